"""Diagnosis: which kind of cause the pattern of a gap points to.

Each kind has a sign that numerics alone do not give: a temperature mismatch makes d a function of
the logprob, a truncated support pulls E[rho] below 1, an off-by-one moves the correlation to the
next token, a route shift vanishes when the rows are moved back. Numerics alone are told as such and
never as a fault; a gap that no sign explains is told as unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rollproof.gap.buckets import Bucket
from rollproof.gap.diagnosis.causes import Cause, CauseName, Rule, Scene, beyond
from rollproof.gap.diagnosis.evidence import gather
from rollproof.gap.diagnosis.rules import LAW_RULES
from rollproof.gap.diagnosis.rules_columns import boundary, lag, replica, versions
from rollproof.gap.diagnosis.shifts import BETTER, ENOUGH, MISMATCH, Shift
from rollproof.gap.phrases import counted
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


def _not_finite(scene: Scene) -> Cause | None:
    wrong = int((~(np.isfinite(scene.pairs.rollout) & np.isfinite(scene.pairs.trainer))).sum())
    if not wrong:
        return None
    sides = [
        name
        for name, values in (("rollout", scene.pairs.rollout), ("trainer", scene.pairs.trainer))
        if not np.isfinite(values).all()
    ]
    return Cause(
        name=CauseName.NOT_FINITE,
        confidence=0.99,
        because=(
            f"{counted(wrong, 'token', 'have')} a logprob that is NaN or infinite"
            f" ({' and '.join(sides)} side)"
        ),
        advice=(
            "Look at the first of them: an overflow in the head, a token outside the trainer's"
            " vocabulary, or a missing logprob that was not masked."
        ),
    )


def _misaligned(scene: Scene) -> Cause | None:
    shift = scene.signs.shift
    if shift is not None:
        told = f"{shift.where}, mean |d| is" if shift.partial else "mean |d| is"
        because = (
            f"{told} {shift.here:.2g} as the logprobs stand and {shift.left:.2g} with the trainer's"
            f" taken one place {_way(shift.step)}"
        )
        return _off_by_one(shift.step, beyond(shift.here / max(shift.left, 1e-6), BETTER), because)
    # sequences that are too short to be looked at one by one
    lagged = {step: value for step, value in scene.signs.lagged.items() if math.isfinite(value)}
    if not lagged:
        return None
    step = max(lagged, key=lambda key: lagged[key])
    here = scene.signs.pearson if math.isfinite(scene.signs.pearson) else 0.0
    if lagged[step] < 0.5 or lagged[step] < here + 0.3:
        return None
    because = (
        f"the logprobs correlate by {here:.2f} as they stand and by {lagged[step]:.2f} with the"
        f" trainer's taken one place {_way(step)}"
    )
    return _off_by_one(step, beyond(lagged[step] - here, 0.3), because)


def _off_by_one(step: int, confidence: float, because: str) -> Cause:
    way = "late" if step > 0 else "early"
    return Cause(
        name=CauseName.OFF_BY_ONE,
        confidence=confidence,
        because=because,
        advice=(
            f"The trainer's logprobs stand one token {way}: logits of position p score the token at"
            " p + 1."
        ),
    )


def _way(step: int) -> str:
    return "further on" if step > 0 else "earlier"


def _routes_moved(scene: Scene) -> Cause | None:
    routes = scene.signs.routes
    if routes is None or not math.isfinite(routes.mismatch):
        return None
    if routes.mismatch < MISMATCH:
        return _routes_partly(routes.shift)
    shifts = [("token", step, left) for step, left in routes.token_shift.items()] + [
        ("layer", step, left) for step, left in routes.layer_shift.items()
    ]
    shifts = [shift for shift in shifts if math.isfinite(shift[2])]
    axis, step, left = min(shifts, key=lambda shift: shift[2], default=("", 0, math.inf))
    if left > routes.mismatch / BETTER:
        return _routes_partly(routes.shift)
    dense = axis == "layer" and routes.dull_layers > 0
    dull = (
        f"; the first {counted(routes.dull_layers, 'layer')} of one side hold no selection"
        if dense
        else ""
    )
    return Cause(
        name=CauseName.DENSE_SHIFT if dense else _MOVED[axis],
        confidence=beyond(routes.mismatch / max(left, 1e-6), BETTER),
        because=(
            f"{routes.mismatch:.0%} of the expert slots differ, and {left:.1%} once the trainer's"
            f" rows are taken {counted(abs(step), axis)} {_way(step)}{dull}"
        ),
        advice=_ROWS,
    )


def _routes_partly(shift: Shift | None) -> Cause | None:
    """Rows that are another token's or layer's in a part of the sequences or layers."""
    if shift is None:
        return None
    if shift.layer_of:
        pairs = ", ".join(f"{layer} those of {other}" for layer, other in shift.layer_of[:4])
        told = (
            "the trainer's routes have the experts of other layers (layer"
            f" {pairs}{' ...' if len(shift.layer_of) > 4 else ''}):"
        )
        mend = "of the layers' slots differ, and {:.1%} from those"
    else:
        told = f"{shift.where}:" if shift.partial else ""
        mend = (
            "of the expert slots differ, and {:.1%} once the trainer's rows are taken "
             f"{counted(abs(shift.step), shift.axis)}"
        )
        mend += f" {_way(shift.step)}"
    dull = (
        f"; the first {counted(shift.dull, 'layer')} of one side hold no selection there"
        if shift.axis == "layer" and shift.dull
        else ""
    )
    return Cause(
        name=CauseName.DENSE_SHIFT if dull else _MOVED[shift.axis],
        confidence=beyond(shift.here / max(shift.left, 1e-6), BETTER),
        because=f"{told} {shift.here:.0%} {mend.format(shift.left)}{dull}".strip(),
        advice=_ROWS,
    )


_MOVED = {"token": CauseName.TOKEN_SHIFT, "layer": CauseName.LAYER_SHIFT}
_ROWS = (
    "Row i of the routes belongs to the forward of token i, and layer n of the model to column n,"
    " or to n's ordinal among the MoE layers."
)


def _polluted(scene: Scene) -> Cause | None:
    routes = scene.signs.routes
    if routes is None or not (
        routes.healthy < 0.15 and (0.01 < routes.polluted < 0.9 or routes.strange or routes.rare)
    ):
        return None
    whole = (
        f" (all of {counted(routes.strange, 'sequence')})"
        if routes.strange
        else f" ({routes.rare:,})"
        if routes.rare
        else ""
    )
    return Cause(
        name=CauseName.POLLUTED,
        confidence=max(
            beyond(routes.polluted, 0.01), 0.9 if routes.strange or routes.rare else 0.5
        ),
        because=(
            f"{routes.polluted:.1%} of the tokens{whole} agree with the trainer's routes no better"
            f" than chance in all layers, while the others differ in {routes.healthy:.1%} of their"
            " slots"
        ),
        advice=(
            "Rows of a draft model, of another request or of padding stand in the capture: check"
            " speculative decoding, and the engine's slot mapping."
        ),
    )


_RULES: Sequence[Rule] = (
    _not_finite,
    _misaligned,
    _routes_moved,
    _polluted,
    versions,
    *LAW_RULES,
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
