"""What vLLM and SGLang send and receive over HTTP, read as events of a trace."""

from __future__ import annotations
