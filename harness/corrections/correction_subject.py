"""Corrections as subjects: the protocol, and how a plain function becomes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from rollproof.core.contract import Contract, KvPolicy, Logprobs, ResumeBy, Rows, Versions
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import CorrectionTerms
from rollproof.errors import ContractError, UsageError

__all__ = [
    "CorrectionSubject",
    "correction_contract",
    "correction_function",
    "correction_terms_of",
]


@runtime_checkable
class CorrectionSubject(Protocol):
    """A correction for off-policy rollouts: a function from logprobs to importance weights, a mask
    and metrics.

    ``contract`` has ``correction`` terms (``rollproof.corrections.correction_contract``): which
    formula is promised, with which bounds.
    """

    contract: Contract

    def correct(self, batch: CorrectionBatch) -> Correction:
        """Pass the batch to the stack's own function, and return what came of it.

        It gets arrays of its own, which it must not change. An exception counts as a refusal.
        """
        ...


def correction_contract(terms: CorrectionTerms | None = None, **declared: Any) -> Contract:
    """Return the contract of a correction.

    Args:
        terms: What it promises.
        declared: The fields of ``CorrectionTerms``, if there are no ``terms``.

    Raises:
        ContractError: A term is unknown, or contradicts another.
    """
    if terms is not None and declared:
        raise ContractError(f"Give the terms or their fields, not both: {sorted(declared)}.")
    return Contract(
        rows=Rows.NONE,
        resume=ResumeBy.NONE,
        versions=Versions.NONE,
        logprobs=Logprobs.NONE,
        # a correction makes no engine calls, which these fields are about
        abort_surfaces=False,
        kv_policy=KvPolicy.RECOMPUTE,
        correction=CorrectionTerms.from_dict(declared) if terms is None else terms,
    )


def correction_terms_of(contract: Contract) -> CorrectionTerms:
    """Return the correction terms of a contract. Raises ``ContractError`` if it has none."""
    if contract.correction is None:
        raise ContractError(
            "The contract declares no correction terms: make it with"
            " rollproof.corrections.correction_contract."
        )
    return contract.correction


def correction_function(
    function: Callable[[CorrectionBatch], Correction], **declared: Any
) -> Callable[[], CorrectionSubject]:
    """Return a factory of a subject with this function.

    Example: ``correction_function(my_weights, upper=2.0)``. ``declared`` are fields of
    ``CorrectionTerms``. Raises ``UsageError`` for a ``function`` that is not callable, and
    ``ContractError`` for terms that cannot be used.
    """
    if not callable(function):
        raise UsageError(
            f"correction_function() takes the function to be judged, not a"
            f" {type(function).__name__}."
        )
    made = {"contract": correction_contract(**declared), "correct": staticmethod(function)}
    subject: type[CorrectionSubject] = type(getattr(function, "__name__", "correction"), (), made)
    return subject
