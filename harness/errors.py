"""The exceptions of rollproof: one class per kind of misuse, each derived from the builtin that a
caller would catch.
"""

from __future__ import annotations

__all__ = [
    "CaseError",
    "ConformanceError",
    "ContractError",
    "EngineDied",
    "EngineError",
    "EngineHung",
    "EngineRefused",
    "EngineStartError",
    "ExpectationError",
    "ExtraError",
    "GapError",
    "LayoutError",
    "ReplayError",
    "RollproofError",
    "RouterError",
    "RoutesError",
    "StackError",
    "SubjectError",
    "TraceError",
    "TraceVersionError",
    "UsageError",
]


class RollproofError(Exception):
    """Base of every error that rollproof raises on purpose; its text names the next step."""


class UsageError(RollproofError, ValueError):
    """A function or command was given an argument, option, id or profile that does not exist; the
    text lists the valid ones.
    """


class ContractError(RollproofError, ValueError):
    """A contract is incomplete or contradicts itself."""


class CaseError(RollproofError, ValueError):
    """A case (requests, actions, engine options) cannot be run as written."""


class LayoutError(RollproofError, ValueError):
    """A layout contradicts itself, or rows, columns or ids do not fit it."""


class ConformanceError(RollproofError, AssertionError):
    """A recorded run broke a promise; the text holds the findings, ``headline`` the first one in
    one line.
    """

    def __init__(self, text: str, headline: str = "") -> None:
        super().__init__(text)
        self.headline: str = headline or text.partition("\n")[0]


class SubjectError(RollproofError, TypeError):
    """A subject does not implement its protocol: a method is missing, or returned a value of the
    wrong type or shape.
    """


class StackError(RollproofError, ImportError):
    """A framework's released package is absent, or of a version that the adapter does not know."""


class ExpectationError(RollproofError, ValueError):
    """A file of expected failures is malformed, or lists a check that is unknown or passes."""


class ExtraError(RollproofError, ImportError):
    """The packages that a feature needs are not installed; the text names the extra that brings
    them.
    """


class GapError(RollproofError, ValueError):
    """Two columns of logprobs cannot be compared: lengths, signs, masks or token ids do not fit."""


class TraceError(RollproofError, ValueError):
    """A trace or counterexample cannot be read: truncated, corrupted, foreign, or beyond the size
    limits.
    """


class TraceVersionError(TraceError):
    """A trace was written by a newer rollproof, in a schema that this one does not know."""


class EngineError(RollproofError, RuntimeError):
    """A real engine cannot be started, is gone, or did not do what was requested."""


class EngineStartError(EngineError):
    """A real engine did not start: it is missing, of another version, died or hung; the text holds
    the end of its log.
    """


class EngineDied(EngineError):
    """The process of a real engine ended while it was used; the text holds the end of its log."""


class EngineHung(EngineError):
    """A real engine did not answer within the deadline; the text holds the end of its log."""


class EngineRefused(EngineError):
    """A real engine answered a call with an error; ``kind`` is the error's class, as the engine
    names it.
    """

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


class ReplayError(RollproofError, RuntimeError):
    """A pass did not replay its routes: a router was not reached, saw other rows, or executed other
    experts.
    """


class RouterError(ReplayError):
    """A model's routers cannot be replayed: there are none, they are not found, or their selection
    cannot be intercepted.
    """


class RoutesError(RollproofError, ValueError):
    """Routes do not fit the model that is to replay them: rows, columns, layers, dtype or ids."""
