"""Coded policy: deterministic fake tokens, logprobs and experts, and how they are decoded."""

from __future__ import annotations
