"""Law causes: the rules of a diagnosis that need no more than the logprobs, and so can be asked of
any part of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rollproof.gap.column_checks import counted
from rollproof.gap.diagnosis.causes import ROUNDING, Cause, CauseName, Rule, Scene, beyond
from rollproof.gap.diagnosis.shifts import BETTER, MISMATCH, Shift

__all__ = ["ALIGNMENT_RULES", "DISTRIBUTION_RULES"]


def _unrelated(scene: Scene) -> Cause | None:
    signs = scene.signs
    if not (signs.k3 > 0.3 and signs.pearson < 0.8 and signs.apart > 0.15):
        return None
    return Cause(
        name=CauseName.UNRELATED,
        confidence=beyond(signs.k3, 0.3),
        because=(
            f"k3 = {signs.k3:.2g} nats a token, {signs.apart:.0%} of a sequence's tokens are apart"
            f" by a factor of 2, the logprobs correlate by {signs.pearson:.2f}, and no shift of"
            " tokens mends it"
        ),
        advice=(
            "One side lost its weights, or scores other sequences: reload both from one checkpoint"
            " and compare a single prompt."
        ),
    )


def _temperature(scene: Scene) -> Cause | None:
    signs = scene.signs
    if not (signs.explained > 0.12 and signs.pearson > 0.5 and signs.size > ROUNDING):
        return None
    if signs.rho_z > 5 and signs.rho_excess > 0:
        told = (
            f"({signs.rho_z:.0f} standard errors): the reported logprobs are not of the law that"
            " sampled"
        )
        advice = (
            "Let the engine report processed logprobs (vLLM: logprobs_mode=processed_logprobs), or"
            " score raw ones on both sides."
        )
    else:
        told = (
            "as it must be: the reported logprobs are of the law that sampled, and the trainer's of"
            " another temperature"
        )
        advice = "Divide the trainer's logits by the sampling temperature before its log-softmax."
    column = scene.pairs.sides.get("temperature")
    given = (
        ""
        if column is None
        else f" (declared: {', '.join(f'{one:g}' for one in np.unique(column)[:4])})"
    )
    return Cause(
        name=CauseName.TEMPERATURE,
        confidence=beyond(signs.explained, 0.12),
        because=(
            f"the rollout logprob alone explains {signs.explained:.0%} of d; E[rho] - 1 ="
            f" {signs.rho_excess:+.3g} {told}{given}"
        ),
        advice=advice,
    )


def _truncated(scene: Scene) -> Cause | None:
    signs = scene.signs
    declared = scene.pairs.sides.get("temperature")
    if (
        declared is not None and (declared == 0).any()
    ):  # tokens that were chosen greedily are no draws: their E[rho] is of no law
        return None
    if not (
        signs.rho_z < -8 and signs.rho_chance < 1e-6 and signs.rho_excess < -1e-3 and signs.k1 > 0
    ):
        return None
    return Cause(
        name=CauseName.TRUNCATED,
        confidence=beyond(-signs.rho_z, 8),
        because=(
            f"E[rho] - 1 = {signs.rho_excess:+.3g} ({signs.rho_z:.0f} standard errors) with k1 ="
            f" {signs.k1:.2g}: the trainer gives mass to tokens that the engine could not sample"
        ),
        advice=(
            "Sample with top_p=1, top_k=-1, min_p=0, or renormalise the trainer's logits over the"
            " sampler's support."
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


ALIGNMENT_RULES: Sequence[Rule] = (_not_finite, _misaligned, _routes_moved, _polluted)
"""Rules that need the logprobs and the routes in their order."""
DISTRIBUTION_RULES: Sequence[Rule] = (_unrelated, _truncated, _temperature)
"""Rules that need the logprobs alone, in any order, and so apply to any part of the tokens."""
