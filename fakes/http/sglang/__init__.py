"""The fake SGLang server."""

from __future__ import annotations
