"""Diagnosis: which kind of cause the pattern of a gap points to.

Each kind has a sign that numerics alone do not give: a temperature mismatch makes d a function of
the logprob, a truncated support pulls E[rho] below 1, an off-by-one moves the correlation to the
next token, a route shift vanishes when the rows are moved back. Numerics alone are told as such and
never as a fault; a gap that no sign explains is told as unexplained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollproof.gap.buckets import Bucket
from rollproof.gap.column_checks import counted
from rollproof.gap.diagnosis.causes import Cause, CauseName, Rule, Scene, beyond
from rollproof.gap.diagnosis.evidence import gather
from rollproof.gap.diagnosis.rules import ALIGNMENT_RULES, DISTRIBUTION_RULES
from rollproof.gap.diagnosis.rules_columns import boundary, lag, replica, versions
from rollproof.gap.diagnosis.shifts import ENOUGH
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["diagnose"]


def diagnose(
    pairs: TokenPairs, buckets: Mapping[str, tuple[Bucket, ...]], *, failing: bool
) -> tuple[Cause, ...]:
    """Causes, the decisive one first. ``failing`` says whether a limit was broken: then numerics
    alone are no answer.
    """
    scene = Scene(pairs=pairs, signs=gather(pairs), buckets=buckets)
    found: list[Cause] = []
    for rule in _RULES:
        if (cause := rule(scene)) is not None and cause.name not in {one.name for one in found}:
            found.append(cause)
    for name, hides in _HIDES.items():
        if any(cause.name == name for cause in found):
            found = [cause for cause in found if cause.name not in hides]
    if found or not scene.signs.tokens:
        return tuple(found)
    if failing:
        return (
            Cause(
                name=CauseName.UNEXPLAINED,
                confidence=0.5,
                because=(
                    "the gap is beyond its limit, and bears no sign of temperature, truncation,"
                    " misalignment, routes or versions"
                ),
                advice=(
                    "Compare the two sides layer by layer, and check kernels, dtypes and the"
                    " sharding of the weights. A model whose own floor is higher (few layers, a"
                    " flat law, MLA, hybrid attention, fp8 on one side) needs limits of its own."
                ),
            ),
        )
    signs = scene.signs
    return (
        Cause(
            name=CauseName.NUMERICS,
            confidence=beyond(0.12, signs.explained + 0.01) if signs.tokens >= ENOUGH else 0.5,
            because=(
                f"E[rho] - 1 = {signs.rho_excess:+.2g} ({signs.rho_z:+.1f} standard errors), k1 ="
                f" {signs.k1:.2g} beside k3 = {signs.k3:.2g}, and the logprob explains"
                f" {signs.explained:.1%} of d"
            )
            + (
                ""
                if signs.tokens >= ENOUGH
                else f"; of {counted(signs.tokens, 'token')} no other sign could show"
            ),
        ),
    )


_RULES: Sequence[Rule] = (
    *ALIGNMENT_RULES,
    versions,
    *DISTRIBUTION_RULES,
    boundary,
    replica,
    lag,
)
_BLURRED = frozenset(
    {
        CauseName.TEMPERATURE,
        CauseName.TRUNCATED,
        CauseName.UNRELATED,
        CauseName.BOUNDARY,
        CauseName.STALENESS,
        CauseName.REPLICA,
    }
)
"""Signs that a large difference of any origin may bear: beside a cause that explains it they are no
second one.
"""
_HIDES: Mapping[CauseName, frozenset[CauseName]] = {
    CauseName.OFF_BY_ONE: _BLURRED,
    CauseName.TOKEN_SHIFT: _BLURRED | {CauseName.POLLUTED},
    CauseName.LAYER_SHIFT: _BLURRED | {CauseName.POLLUTED},
    CauseName.DENSE_SHIFT: _BLURRED | {CauseName.POLLUTED},
    CauseName.POLLUTED: _BLURRED,
    CauseName.STUCK: frozenset({CauseName.TEMPERATURE, CauseName.UNRELATED, CauseName.STALENESS}),
    CauseName.WRONG_VERSION: frozenset(
        {CauseName.TEMPERATURE, CauseName.UNRELATED, CauseName.STALENESS}
    ),
    CauseName.UNRELATED: _BLURRED - {CauseName.UNRELATED},
    # a temperature keeps E[rho] at 1 or above, whichever side applies it
    CauseName.TRUNCATED: frozenset({CauseName.TEMPERATURE}),
}
