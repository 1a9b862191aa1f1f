"""Rules of the diagnosis that need no optional column but the routes.

``ALIGNMENT_RULES`` look at logprobs and routes in their order; ``DISTRIBUTION_RULES`` look at the
logprobs alone, in any order, and so apply to any part of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rollproof.gap.column_checks import counted
from rollproof.gap.diagnosis.causes import (
    ROUNDING,
    Cause,
    CauseName,
    Rule,
    Scene,
    confidence_beyond,
)
from rollproof.gap.diagnosis.shifts import BETTER, MISMATCH, Shift

__all__ = ["ALIGNMENT_RULES", "DISTRIBUTION_RULES", "EXPLAINED", "PART_ADVICE"]

PART_ADVICE = (
    "Both sides have the weights, since a part agrees: look at what is different in the rest, such"
    " as samples that were swapped, another context from some token on, or one engine of several."
)

EXPLAINED = 0.12
"""Share of d that a function of the logprob may explain by numerics alone."""
_POLLUTED = 0.01
# Standard errors below 0 from which E[rho] - 1 is a sign of truncation
_MIN_Z = 8
_MAX_LISTED = 4
_SHIFTS = {"token": CauseName.TOKEN_SHIFT, "layer": CauseName.LAYER_SHIFT}
_ROUTE_ADVICE = (
    "Row i of the routes belongs to the forward of token i, and layer n of the model to column n,"
    " or to n's ordinal among the MoE layers."
)


def _not_finite(scene: Scene) -> Cause | None:
    wrong = int((~scene.pairs.finite).sum())
    if not wrong:
        return None
    logprobs = {"rollout": scene.pairs.rollout, "trainer": scene.pairs.trainer}
    names = [name for name, values in logprobs.items() if not np.isfinite(values).all()]
    return Cause(
        name=CauseName.NOT_FINITE,
        confidence=0.99,
        because=(
            f"{counted(wrong, 'token', 'have')} a logprob that is NaN or infinite"
            f" ({' and '.join(names)} side)"
        ),
        advice=(
            "Look at the first of them: an overflow in the head, a token outside the trainer's"
            " vocabulary, or a missing logprob that was not masked."
        ),
    )


def _misaligned(scene: Scene) -> Cause | None:
    shift = scene.signs.shift
    if shift is not None:
        place = f"{shift.where}, " if shift.partial else ""
        because = (
            f"{place}mean |d| is {shift.here:.2g} unshifted and {shift.left:.2g} with"
            f" the trainer's taken one place {_direction(shift.step)}"
        )
        confidence = confidence_beyond(shift.here / max(shift.left, 1e-6), BETTER)
        return _off_by_one(shift.step, confidence, because, partial=shift.partial)
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
        f" trainer's taken one place {_direction(step)}"
    )
    return _off_by_one(step, confidence_beyond(lagged[step] - here, 0.3), because)


def _off_by_one(step: int, confidence: float, because: str, *, partial: bool = False) -> Cause:
    late, early = ("late", "early") if step > 0 else ("early", "late")
    resumed = (
        " If it begins within a sequence, look at the rollout's first: a resume that drops or"
        " repeats one logprob moves all later ones."
    )
    return Cause(
        name=CauseName.OFF_BY_ONE,
        confidence=confidence,
        because=because,
        advice=(
            f"The trainer's logprobs are one token {late}, or the rollout's {early}: the logits"
            " of position p must score the token at p + 1, and no other."
            f"{resumed if partial else ''}"
        ),
    )


def _direction(step: int) -> str:
    return "further on" if step > 0 else "earlier"


def _routes_moved(scene: Scene) -> Cause | None:
    routes = scene.signs.routes
    if routes is None or not math.isfinite(routes.mismatch):
        return None
    if routes.mismatch < MISMATCH:
        return _routes_partly_moved(routes.shift)
    shifts = [
        (axis, step, left)
        for axis, by_step in (("token", routes.token_shift), ("layer", routes.layer_shift))
        for step, left in by_step.items()
        if math.isfinite(left)
    ]
    axis, step, left = min(shifts, key=lambda shift: shift[2], default=("", 0, math.inf))
    if left > routes.mismatch / BETTER:
        return _routes_partly_moved(routes.shift)
    dense, empty = axis == "layer" and routes.empty_layers > 0, ""
    if dense:
        layers = counted(routes.empty_layers, "layer")
        empty = f"; the first {layers} of one side hold no selection"
    return Cause(
        name=CauseName.DENSE_SHIFT if dense else _SHIFTS[axis],
        confidence=confidence_beyond(routes.mismatch / max(left, 1e-6), BETTER),
        because=(
            f"{routes.mismatch:.0%} of the expert slots differ, and {left:.1%} once the trainer's"
            f" rows are taken {counted(abs(step), axis)} {_direction(step)}{empty}"
        ),
        advice=_ROUTE_ADVICE,
    )


def _routes_partly_moved(shift: Shift | None) -> Cause | None:
    """A cause for rows of another token or layer in a part of the sequences or layers."""
    if shift is None:
        return None
    if shift.layer_of:
        layers = [f"{layer} those of {other}" for layer, other in shift.layer_of[:_MAX_LISTED]]
        dots = " ..." if len(shift.layer_of) > _MAX_LISTED else ""
        place = (
            f"the trainer's routes have the experts of other layers (layer {', '.join(layers)}"
            f"{dots}): "
        )
        finding = f"of the layers' slots differ, and {shift.left:.1%} from those"
    else:
        place = f"{shift.where}: " if shift.partial else ""
        finding = (
            f"of the expert slots differ, and {shift.left:.1%} once the trainer's rows are taken"
            f" {counted(abs(shift.step), shift.axis)} {_direction(shift.step)}"
        )
    dense, empty = shift.axis == "layer" and shift.empty > 0, ""
    if dense:
        layers_text = counted(shift.empty, "layer")
        empty = f"; the first {layers_text} of one side hold no selection there"
    return Cause(
        name=CauseName.DENSE_SHIFT if dense else _SHIFTS[shift.axis],
        confidence=confidence_beyond(shift.here / max(shift.left, 1e-6), BETTER),
        because=f"{place}{shift.here:.0%} {finding}{empty}",
        advice=_ROUTE_ADVICE,
    )


def _polluted(scene: Scene) -> Cause | None:
    routes = scene.signs.routes
    if routes is None or not routes.healthy < 0.15:
        return None
    # a few strange sequences or rows are a smaller share than healthy noise
    distinct = routes.strange or routes.rare
    if not (_POLLUTED < routes.polluted < 0.9 or distinct):
        return None
    number = ""
    if routes.strange:
        number = f" (all of {counted(routes.strange, 'sequence')})"
    elif routes.rare:
        number = f" ({routes.rare:,})"
    return Cause(
        name=CauseName.POLLUTED,
        confidence=max(confidence_beyond(routes.polluted, _POLLUTED), 0.9 if distinct else 0.5),
        because=(
            f"{routes.polluted:.1%} of the tokens{number} agree with the trainer's routes no better"
            f" than chance in all layers, while the others differ in {routes.healthy:.1%} of their"
            " slots"
        ),
        advice=(
            "Rows of a draft model, of another request or of padding are in the capture: check"
            " speculative decoding, and the engine's slot mapping."
        ),
    )


def _unrelated(scene: Scene) -> Cause | None:
    signs = scene.signs
    if not signs.little_in_common:
        return None
    if signs.agreeing:
        return Cause(
            name=CauseName.PART_UNRELATED,
            confidence=confidence_beyond(signs.k3, 0.3),
            because=(
                f"k3 = {signs.k3:.2g} nats a token, and {signs.apart:.0%} of a sequence's tokens"
                f" are apart by a factor of 2, but {signs.agreeing}"
            ),
            advice=PART_ADVICE,
        )
    return Cause(
        name=CauseName.UNRELATED,
        confidence=confidence_beyond(signs.k3, 0.3),
        because=(
            f"k3 = {signs.k3:.2g} nats a token, {signs.apart:.0%} of a sequence's tokens are apart"
            f" by a factor of 2, the logprobs correlate by {signs.pearson:.2f}, no shift of"
            " tokens mends it, and no part of the tokens agrees"
        ),
        advice=(
            "One side lost its weights, or scores other sequences: reload both from one checkpoint"
            " and compare a single prompt."
        ),
    )


def _temperature(scene: Scene) -> Cause | None:
    signs = scene.signs
    if not (signs.explained > EXPLAINED and signs.pearson > 0.5 and signs.size > ROUNDING):
        return None
    if signs.rho_z > 5 and signs.rho_excess > 0:
        reading = (
            f"({signs.rho_z:.0f} standard errors): the reported logprobs are not of the"
            " distribution that sampled"
        )
        advice = (
            "Let the engine report processed logprobs (vLLM: logprobs_mode=processed_logprobs), or"
            " score raw ones on both sides."
        )
    else:
        reading = (
            "as it must be: the reported logprobs are of the distribution that sampled, and the"
            " trainer's of another temperature"
        )
        advice = "Divide the trainer's logits by the sampling temperature before its log-softmax."
    column = scene.pairs.columns.get("temperature")
    declared = ""
    if column is not None:
        temperatures = [f"{temperature:g}" for temperature in np.unique(column)[:_MAX_LISTED]]
        declared = f" (declared: {', '.join(temperatures)})"
    return Cause(
        name=CauseName.TEMPERATURE,
        confidence=confidence_beyond(signs.explained, EXPLAINED),
        because=(
            f"the rollout logprob alone explains {signs.explained:.0%} of d; E[rho] - 1 ="
            f" {signs.rho_excess:+.3g} {reading}{declared}"
        ),
        advice=advice,
    )


def _truncated(scene: Scene) -> Cause | None:
    signs = scene.signs
    temperatures = scene.pairs.columns.get("temperature")
    if temperatures is not None and (temperatures == 0).any():
        # greedy tokens are no draws, so their E[rho] says nothing about a distribution
        return None
    certain = signs.rho_z < -_MIN_Z and signs.rho_chance < 1e-6
    if not (certain and signs.rho_excess < -1e-3 and signs.k1 > 0):
        return None
    return Cause(
        name=CauseName.TRUNCATED,
        confidence=confidence_beyond(-signs.rho_z, _MIN_Z),
        because=(
            f"E[rho] - 1 = {signs.rho_excess:+.3g} ({signs.rho_z:.0f} standard errors) with k1 ="
            f" {signs.k1:.2g}: the trainer gives mass to tokens that the engine could not sample"
        ),
        advice=(
            "Sample with top_p=1, top_k=-1, min_p=0, or renormalise the trainer's logits over the"
            " sampler's support."
        ),
    )


ALIGNMENT_RULES: Sequence[Rule] = (_not_finite, _misaligned, _routes_moved, _polluted)
DISTRIBUTION_RULES: Sequence[Rule] = (_unrelated, _truncated, _temperature)
