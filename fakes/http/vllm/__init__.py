"""The fake vLLM server."""

from __future__ import annotations
