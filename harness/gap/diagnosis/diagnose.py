"""The diagnosis: which kind of cause the pattern of a gap points to.

Each kind has a sign that numerics alone do not give: a temperature mismatch makes d a function of
the logprob, a truncated support pulls E[rho] below 1, an off-by-one moves the correlation to the
next token, a route shift vanishes when the rows are moved back. A gap with the pattern of numerics
is named so and is no fault; a gap that no sign explains is named unexplained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollproof.gap.buckets import Bucket
from rollproof.gap.column_checks import counted
from rollproof.gap.diagnosis.arrival import Arrival
from rollproof.gap.diagnosis.causes import Cause, CauseName, Rule, Scene, confidence_beyond
from rollproof.gap.diagnosis.evidence import Evidence, gather_evidence
from rollproof.gap.diagnosis.rules import ALIGNMENT_RULES, DISTRIBUTION_RULES, EXPLAINED
from rollproof.gap.diagnosis.rules_arrival import arrival
from rollproof.gap.diagnosis.rules_columns import boundary, lag, versions
from rollproof.gap.diagnosis.rules_groups import compare_groups, replica
from rollproof.gap.diagnosis.rules_places import end_without_logprob, packing
from rollproof.gap.diagnosis.shifts import ENOUGH
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["diagnose"]


def diagnose(
    pairs: TokenPairs,
    buckets: Mapping[str, tuple[Bucket, ...]],
    arrivals: tuple[Arrival, ...] = (),
    *,
    failing: bool,
) -> tuple[Cause, ...]:
    """Return the likely causes, the decisive one first.

    ``failing`` says whether a limit is broken: then numerics alone are no explanation.
    """
    scene = Scene(pairs=pairs, signs=gather_evidence(pairs), buckets=buckets, arrivals=arrivals)
    causes: dict[CauseName, Cause] = {}
    for rule in _RULES:
        cause = rule(scene)
        if cause is not None:
            causes.setdefault(cause.name, cause)
    # a cause of one group says more than the same cause of all tokens
    causes |= {cause.name: cause for cause in compare_groups(scene)}
    for name, hidden in _HIDES.items():
        if name in causes:
            causes = {other: cause for other, cause in causes.items() if other not in hidden}
    if causes or not scene.signs.tokens:
        return tuple(causes.values())
    return (_unexplained(),) if failing else (_numerics(scene.signs),)


def _unexplained() -> Cause:
    return Cause(
        name=CauseName.UNEXPLAINED,
        confidence=0.5,
        because=(
            "the gap is beyond its limit, and bears no sign of temperature, truncation,"
            " misalignment, routes or versions"
        ),
        advice=(
            "Compare the two sides layer by layer, and check kernels, dtypes and the sharding of"
            " the weights. A model with a higher floor (few layers, a flat distribution, MLA,"
            " hybrid attention, fp8 on one side) needs its own limits."
        ),
    )


def _numerics(signs: Evidence) -> Cause:
    enough = signs.tokens >= ENOUGH
    few = "" if enough else f"; {counted(signs.tokens, 'token')} cannot show other signs"
    return Cause(
        name=CauseName.NUMERICS,
        confidence=confidence_beyond(EXPLAINED, signs.explained + 0.01) if enough else 0.5,
        because=(
            f"E[rho] - 1 = {signs.rho_excess:+.2g} ({signs.rho_z:+.1f} standard errors), k1 ="
            f" {signs.k1:.2g} with k3 = {signs.k3:.2g}, and the logprob explains"
            f" {signs.explained:.1%} of d{few}"
        ),
    )


# In order: tokens or rows at the wrong place explain all that comes after
_RULES: Sequence[Rule] = (
    *ALIGNMENT_RULES,
    end_without_logprob,
    packing,
    versions,
    arrival,
    *DISTRIBUTION_RULES,
    boundary,
    replica,
    lag,
)
# Signs that any large difference may bear: a cause that explains it explains them
_BLURRED = frozenset(
    {
        CauseName.TEMPERATURE,
        CauseName.TRUNCATED,
        CauseName.UNRELATED,
        CauseName.BOUNDARY,
        CauseName.STALENESS,
        CauseName.REPLICA,
        CauseName.GROUP,
        CauseName.PART_UNRELATED,
    }
)
_OLD_WEIGHTS = frozenset(
    {
        CauseName.TEMPERATURE,
        CauseName.UNRELATED,
        CauseName.PART_UNRELATED,
        CauseName.STALENESS,
        CauseName.REPLICA,
        CauseName.GROUP,
    }
)
_HIDES: Mapping[CauseName, frozenset[CauseName]] = {
    CauseName.OFF_BY_ONE: _BLURRED,
    CauseName.TOKEN_SHIFT: _BLURRED | {CauseName.POLLUTED},
    CauseName.LAYER_SHIFT: _BLURRED | {CauseName.POLLUTED},
    CauseName.DENSE_SHIFT: _BLURRED | {CauseName.POLLUTED},
    CauseName.POLLUTED: _BLURRED,
    # with a part of the update the version before may fit better than the tagged one
    CauseName.PARTLY: _OLD_WEIGHTS | {CauseName.WRONG_VERSION},
    CauseName.WRONG_VERSION: _OLD_WEIGHTS - {CauseName.REPLICA, CauseName.GROUP}
    | {CauseName.STUCK},
    CauseName.STUCK: _OLD_WEIGHTS,
    CauseName.PACKING: frozenset(
        {CauseName.UNRELATED, CauseName.PART_UNRELATED, CauseName.TEMPERATURE}
    ),
    CauseName.UNRELATED: _BLURRED - {CauseName.UNRELATED},
    CauseName.PART_UNRELATED: frozenset({CauseName.TEMPERATURE, CauseName.TRUNCATED}),
    # a temperature keeps E[rho] at 1 or above, whichever side applies it
    CauseName.TRUNCATED: frozenset({CauseName.TEMPERATURE}),
}
