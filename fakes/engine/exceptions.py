"""Failures that callers of a fake engine meet; each is below the builtin that a real client would
raise.
"""

from __future__ import annotations

__all__ = ["BadCall", "EngineFailure", "EnginePaused", "ReplyLost", "ServerDied", "TransferFailed"]


class EngineFailure(Exception):
    """Base of what an engine does to its callers. Not a ``RollproofError``: a stack may let it
    through, and is judged by it.
    """


class ServerDied(EngineFailure, ConnectionError):
    """The server died with the call in it; what it had sampled is lost."""


class ReplyLost(EngineFailure, ConnectionError):
    """The connection broke after the engine had answered; the caller cannot know what was sampled."""


class EnginePaused(EngineFailure, RuntimeError):
    """The engine takes no calls while it is paused, and says so by raising (TensorRT-LLM)."""


class TransferFailed(EngineFailure, RuntimeError):
    """A weight transfer broke in the middle; the server still has its old weights."""


class BadCall(EngineFailure, ValueError):
    """A call that real engines refuse: no prompt, a budget below 1, a start of routes outside the
    prompt.
    """
