"""The family ``engine``, and the checks of other families that also judge an engine that is driven
directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.engine_contract import StreamMode
from rollproof.invariants.engine import engine_calls, engine_ends, engine_replies, engine_values
from rollproof.judging.checks import Applies, Check

__all__ = ["CHECKS", "SHARED", "shared"]

CHECKS: tuple[Check, ...] = (
    engine_values.engine_routes,
    engine_values.engine_order,
    engine_values.engine_logprobs,
    engine_values.engine_logprob_mode,
    engine_values.engine_sampling,
    engine_replies.engine_rows,
    engine_replies.engine_parts,
    engine_replies.engine_spans,
    engine_replies.engine_opt_in,
    engine_replies.engine_stream,
    engine_replies.engine_identity,
    engine_ends.engine_ends,
    engine_ends.engine_length,
    engine_ends.engine_samples,
    engine_calls.engine_answers,
    engine_calls.engine_refusals,
    engine_calls.engine_paused_calls,
)
"""The family ``engine``, in the order of a report."""


def _always(_contract: Contract) -> str | None:
    return None


def _aborts(contract: Contract) -> str | None:
    no_aborts = contract.engine is not None and not contract.engine.aborts
    return "the engine declares that its calls cannot be aborted" if no_aborts else None


def _progress_visible(contract: Contract) -> str | None:
    """Return why the progress of a running call is not visible."""
    hidden = contract.engine is not None and not set(contract.engine.stream_modes) - {
        StreamMode.FINAL
    }
    return (
        "the engine declares no streaming: the progress of a call is not visible"
        if hidden
        else None
    )


def _sampler_known(contract: Contract) -> str | None:
    """Return why nothing shows which weights sampled a token."""
    silent = contract.engine is not None and contract.logprobs is Logprobs.NONE
    return (
        "the engine returns no logprobs: nothing shows which weights sampled a token"
        if silent
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
    "routes.immutable": _sampler_known,
    "routes.prefix-cache": _always,
    "versions.published": _always,
    "versions.engine-tags": _sampler_known,
    "weights.no-admission-while-paused": engine_calls.pauses,
    "weights.no-token-while-paused": lambda contract: (
        engine_calls.pauses(contract) or _progress_visible(contract)
    ),
    "weights.served-after-update": _sampler_known,
    "weights.no-stale-cache": lambda contract: (
        None if contract.has_routes else _sampler_known(contract)
    ),
    "lifecycle.ends-once": _always,
    "lifecycle.no-hang": _always,
    "lifecycle.abort-hits-target": _aborts,
    "lifecycle.abort-keeps-tokens": lambda contract: (
        _aborts(contract) or _progress_visible(contract)
    ),
}
"""The checks that judge what an engine does, whatever client calls it, with what the engine's terms
rule out of them.

With rollproof's own client, only the engine can be at fault.
"""


# These checks were written for rollouts. An engine that is driven directly has the same duties, but
# its terms may rule some of them out.
def shared(check: Check) -> Check:
    """Return the check; if it is one of ``SHARED``, let it judge engines as well."""
    if check.id not in SHARED:
        return check
    own, engine_rule = check.applies, SHARED[check.id]

    def applies(contract: Contract) -> str | None:
        return engine_rule(contract) or (own(contract) if own is not None else None)

    return replace(check, also=(*check.also, "engines"), applies=applies)
