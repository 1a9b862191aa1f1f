"""Engines: the family ``engine``, and which checks of other families judge an engine that is driven
directly, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.engine_contract import StreamMode
from rollproof.invariants.engine import engine_calls, engine_replies, engine_values
from rollproof.judging.checks import Applies, Check

__all__ = ["CHECKS", "SHARED", "shared"]

CHECKS: tuple[Check, ...] = (
    engine_values.engine_routes,
    engine_values.engine_order,
    engine_values.engine_logprobs,
    engine_values.engine_logprob_mode,
    engine_replies.engine_rows,
    engine_replies.engine_parts,
    engine_replies.engine_spans,
    engine_replies.engine_opt_in,
    engine_replies.engine_stream,
    engine_replies.engine_identity,
    engine_calls.engine_answers,
    engine_calls.engine_refusals,
    engine_calls.engine_paused_calls,
)
"""The family ``engine``, in the order of a report."""


def _always(_contract: Contract) -> str | None:
    return None


def _aborts(contract: Contract) -> str | None:
    none = contract.engine is not None and not contract.engine.aborts
    return "the engine declares that its calls cannot be aborted" if none else None


def _seen(contract: Contract) -> str | None:
    """Why nobody sees how far a call has come while it runs."""
    blind = contract.engine is not None and not set(contract.engine.stream_modes) - {
        StreamMode.FINAL
    }
    return (
        "the engine declares that it streams nothing: how far a call has come is not seen"
        if blind
        else None
    )


def _told(contract: Contract) -> str | None:
    """Why nothing tells which weights an engine sampled a token from."""
    mute = contract.engine is not None and contract.logprobs is Logprobs.NONE
    return (
        "the engine returns no logprobs: nothing tells which weights sampled a token"
        if mute
        else None
    )


SHARED: Mapping[str, Applies] = {
    "stitch.budget-total": _always,
    "stitch.logprobs-length": _always,
    "stitch.logprobs-valid": _always,
    "routes.rows": _always,
    "routes.shape": _always,
    "routes.dtype": _always,
    "routes.distinct": _always,
    "routes.in-range": _always,
    "routes.live": _always,
    "routes.immutable": _told,
    "routes.prefix-cache": _always,
    "versions.published": _always,
    "versions.engine-tags": _told,
    "weights.no-admission-while-paused": engine_calls.pauses,
    "weights.no-token-while-paused": lambda contract: (
        engine_calls.pauses(contract) or _seen(contract)
    ),
    "weights.served-after-update": _told,
    "weights.no-stale-cache": lambda contract: None if contract.has_routes else _told(contract),
    "lifecycle.ends-once": _always,
    "lifecycle.no-hang": _always,
    "lifecycle.abort-hits-target": _aborts,
    "lifecycle.abort-keeps-tokens": lambda contract: (
        _aborts(contract) or _seen(contract) or _told(contract)
    ),
}
"""Checks that judge what an engine does, whoever asked it, and what an engine's own terms rule out
of them.

With a client of rollproof's own, nobody but the engine can be at fault.
"""


def shared(check: Check) -> Check:
    """The check, judging engines too where it is one of ``SHARED``."""
    if check.id not in SHARED:
        return check
    own, terms = check.applies, SHARED[check.id]

    def applies(contract: Contract) -> str | None:
        return terms(contract) or (own(contract) if own is not None else None)

    return replace(check, also=(*check.also, "engines"), applies=applies)
