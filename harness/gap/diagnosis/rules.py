"""Law causes: the rules of a diagnosis that need no more than the logprobs, and so can be asked of
any part of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollproof.gap.diagnosis.causes import ROUNDING, Cause, CauseName, Rule, Scene, beyond

__all__ = ["LAW_RULES"]


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


LAW_RULES: Sequence[Rule] = (_unrelated, _truncated, _temperature)
