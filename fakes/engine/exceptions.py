"""Exceptions of a fake engine's calls, each a subclass of the builtin that a real client raises."""

from __future__ import annotations

__all__ = ["BadCall", "EngineFailure", "EnginePaused", "ReplyLost", "ServerDied", "TransferFailed"]


class EngineFailure(Exception):
    """Base class of the failures of an engine.

    Not a ``RollproofError``: a stack may let it pass, and is judged by that.
    """


class ServerDied(EngineFailure, ConnectionError):
    """The server died during the call; the sampled tokens are lost."""


class ReplyLost(EngineFailure, ConnectionError):
    """The connection broke before the reply arrived; the caller cannot know what was sampled."""


class EnginePaused(EngineFailure, RuntimeError):
    """The engine refuses calls while it is paused, by raising (TensorRT-LLM)."""


class TransferFailed(EngineFailure, RuntimeError):
    """A weight transfer broke; the server still has its old weights."""


class BadCall(EngineFailure, ValueError):
    """A call that real engines refuse: no prompt, no budget, or routes from after the prompt."""
