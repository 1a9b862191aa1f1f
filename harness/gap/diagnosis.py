"""Diagnosis: which kind of cause the pattern of a gap points to.

Each kind has a sign that numerics alone do not give: a temperature mismatch makes d a function of the logprob, a truncated
support pulls E[rho] below 1, an off-by-one moves the correlation to the next token, a route shift vanishes when the rows
are moved back. Numerics alone are told as such and never as a fault; a gap that no sign explains is told as unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from rollproof.gap.buckets import Bucket
from rollproof.gap.columns import known
from rollproof.gap.evidence import Evidence, gather
from rollproof.gap.pairs import TokenPairs
from rollproof.gap.quantiles import abs_diff

__all__ = ["CLASSES", "NUMERICS", "Cause", "diagnose"]

NUMERICS = "numerics only"
UNEXPLAINED = "unexplained"
_ALWAYS_WRONG = frozenset(
    {
        "not finite",
        "off by one",
        "routes shifted by a token",
        "routes shifted by a layer",
        "routes shifted by dense layers",
        "polluted capture",
        "stale engine weights",
        "wrong version scored",
    }
)
"""Others are wrong or meant: whoever samples with top-p or scores older tokens under newer weights may know it."""
_ROUNDING = 1e-5
"""What float32 does to a logprob, in nats: a mean |d| below it has no cause that is worth a name, wherever it is larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A likely kind of cause: its name, how far the sign is beyond what numerics give (0.5 to 1), the sign in words, and what to do."""

    name: str
    confidence: float
    because: str
    advice: str = ""

    @property
    def harmless(self) -> bool:
        """Whether nothing needs to be done about it."""
        return self.name == NUMERICS

    @property
    def fault(self) -> bool:
        """Whether it is wrong at any size, so that a gap within its limits excuses it no more than one beyond them."""
        return self.name in _ALWAYS_WRONG and self.confidence >= 0.7

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"class": self.name, "confidence": round(self.confidence, 3), "because": self.because, "advice": self.advice}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Scene:
    pairs: TokenPairs
    signs: Evidence
    buckets: Mapping[str, tuple[Bucket, ...]]


_Rule: TypeAlias = "Callable[[_Scene], Cause | None]"


def diagnose(pairs: TokenPairs, buckets: Mapping[str, tuple[Bucket, ...]], *, failing: bool) -> tuple[Cause, ...]:
    """Causes, the decisive one first. ``failing`` says whether a limit was broken: then numerics alone are no answer."""
    scene = _Scene(pairs=pairs, signs=gather(pairs), buckets=buckets)
    found = [cause for rule in _RULES if (cause := rule(scene)) is not None]
    for name, hides in _HIDES.items():
        if any(cause.name == name for cause in found):
            found = [cause for cause in found if cause.name not in hides]
    if found or not scene.signs.tokens:
        return tuple(found)
    if failing:
        return (
            Cause(
                name=UNEXPLAINED,
                confidence=0.5,
                because="the gap is beyond its limit, and bears no sign of temperature, truncation, misalignment, routes or versions",
                advice="Compare the two sides layer by layer, and check kernels, dtypes and the sharding of the weights.",
            ),
        )
    signs = scene.signs
    return (
        Cause(
            name=NUMERICS,
            confidence=_beyond(0.12, signs.explained + 0.01),
            because=f"E[rho] - 1 = {signs.rho_excess:+.2g} ({signs.rho_z:+.1f} standard errors), k1 = {signs.k1:.2g} beside k3 ="
            f" {signs.k3:.2g},"
            f" and the logprob explains {signs.explained:.1%} of d",
        ),
    )


def _beyond(value: float, bound: float) -> float:
    """0.5 at the bound, towards 1 beyond it."""
    if bound <= 0 or not math.isfinite(value):
        return 0.5
    return float(min(0.99, max(0.5, 1 - 0.5 * bound / value)))


def _not_finite(scene: _Scene) -> Cause | None:
    wrong = int((~(np.isfinite(scene.pairs.rollout) & np.isfinite(scene.pairs.trainer))).sum())
    if not wrong:
        return None
    sides = [name for name, values in (("rollout", scene.pairs.rollout), ("trainer", scene.pairs.trainer)) if not np.isfinite(values).all()]
    return Cause(
        name="not finite",
        confidence=0.99,
        because=f"{wrong:,} tokens have a logprob that is NaN or infinite ({' and '.join(sides)} side)",
        advice="Look at the first of them: an overflow in the head, a token outside the trainer's vocabulary, or a missing"
        " logprob that was not masked.",
    )


def _misaligned(scene: _Scene) -> Cause | None:
    lagged = {step: value for step, value in scene.signs.lagged.items() if math.isfinite(value)}
    if not lagged:
        return None
    step = max(lagged, key=lambda key: lagged[key])
    here = scene.signs.pearson if math.isfinite(scene.signs.pearson) else 0.0
    if lagged[step] < 0.5 or lagged[step] < here + 0.3:
        return None
    way = "late" if step > 0 else "early"
    return Cause(
        name="off by one",
        confidence=_beyond(lagged[step] - here, 0.3),
        because=f"the logprobs correlate by {here:.2f} as they stand and by {lagged[step]:.2f} with the trainer's taken one place"
        f" {'further on' if step > 0 else 'earlier'}",
        advice=f"The trainer's logprobs stand one token {way}: logits of position p score the token at p + 1.",
    )


def _unrelated(scene: _Scene) -> Cause | None:
    signs = scene.signs
    if not (signs.k3 > 0.3 and signs.pearson < 0.8):
        return None
    return Cause(
        name="unrelated weights",
        confidence=_beyond(signs.k3, 0.3),
        because=f"k3 = {signs.k3:.2g} nats a token, the logprobs correlate by {signs.pearson:.2f}, and no shift of tokens mends it",
        advice="One side lost its weights, or scores other sequences: reload both from one checkpoint and compare a single prompt.",
    )


def _temperature(scene: _Scene) -> Cause | None:
    signs = scene.signs
    if not (signs.explained > 0.12 and signs.pearson > 0.5):
        return None
    if signs.rho_z > 5 and signs.rho_excess > 0:
        told = f"({signs.rho_z:.0f} standard errors): the reported logprobs are not of the law that sampled"
        advice = "Let the engine report processed logprobs (vLLM: logprobs_mode=processed_logprobs), or score raw ones on both sides."
    else:
        told = "as it must be: the reported logprobs are of the law that sampled, and the trainer's of another temperature"
        advice = "Divide the trainer's logits by the sampling temperature before its log-softmax."
    column = scene.pairs.sides.get("temperature")
    given = "" if column is None else f" (declared: {', '.join(f'{one:g}' for one in np.unique(column)[:4])})"
    return Cause(
        name="temperature or logprob mode",
        confidence=_beyond(signs.explained, 0.12),
        because=f"the rollout logprob alone explains {signs.explained:.0%} of d; E[rho] - 1 = {signs.rho_excess:+.3g} {told}{given}",
        advice=advice,
    )


def _truncated(scene: _Scene) -> Cause | None:
    signs = scene.signs
    if not (signs.rho_z < -8 and signs.rho_excess < -1e-3 and signs.k1 > 0):
        return None
    return Cause(
        name="truncated support (top-p or top-k)",
        confidence=_beyond(-signs.rho_z, 8),
        because=f"E[rho] - 1 = {signs.rho_excess:+.3g} ({signs.rho_z:.0f} standard errors) with k1 = {signs.k1:.2g}: the trainer"
        " gives mass to"
        " tokens that the engine could not sample",
        advice="Sample with top_p=1, top_k=-1, min_p=0, or renormalise the trainer's logits over the sampler's support.",
    )


def _routes_moved(scene: _Scene) -> Cause | None:
    routes = scene.signs.routes
    if routes is None or not math.isfinite(routes.mismatch) or routes.mismatch < 0.3:
        return None
    shifts = [("token", step, left) for step, left in routes.token_shift.items()] + [
        ("layer", step, left) for step, left in routes.layer_shift.items()
    ]
    shifts = [shift for shift in shifts if math.isfinite(shift[2])]
    if not shifts:
        return None
    what, step, left = min(shifts, key=lambda shift: shift[2])
    if left > routes.mismatch / 3:
        return None
    dense = what == "layer" and routes.dull_layers > 0
    name = "routes shifted by dense layers" if dense else f"routes shifted by a {what}"
    dull = f"; the first {routes.dull_layers} layers of one side hold no selection" if dense else ""
    return Cause(
        name=name,
        confidence=_beyond(routes.mismatch / max(left, 1e-6), 3),
        because=f"{routes.mismatch:.0%} of the expert slots differ, and {left:.1%} once the trainer's rows are taken {abs(step)}"
        f" {what}{'s' if abs(step) > 1 else ''} {'further on' if step > 0 else 'earlier'}{dull}",
        advice="Row i of the routes belongs to the forward of token i, and layer n of the model to column n, or to n's ordinal"
        " among the MoE layers.",
    )


def _polluted(scene: _Scene) -> Cause | None:
    routes = scene.signs.routes
    if routes is None or not (0.01 < routes.polluted < 0.9 and routes.healthy < 0.15):
        return None
    return Cause(
        name="polluted capture",
        confidence=_beyond(routes.polluted, 0.01),
        because=f"{routes.polluted:.1%} of the tokens agree with the trainer's routes no better than chance in all layers, while"
        f" the others differ in {routes.healthy:.1%} of their slots",
        advice="Rows of a draft model, of another request or of padding stand in the capture: check speculative decoding, and"
        " the engine's slot mapping.",
    )


def _versions(scene: _Scene) -> Cause | None:
    pairs = scene.pairs
    tags = pairs.sides.get("version")
    if tags is None or len(pairs.by_version) < 2:
        return None
    fits: dict[Any, Any] = {}
    for tag in np.unique(tags[known(tags)]):
        own = tags == tag
        with np.errstate(invalid="ignore"):
            apart = {version: np.abs(scores[own] - pairs.rollout[own]) for version, scores in pairs.by_version.items()}
        apart = {version: size[np.isfinite(size)] for version, size in apart.items() if np.isfinite(size).any()}
        errors = {version: float(np.median(size)) for version, size in apart.items()}
        mean = {version: float(np.mean(size)) for version, size in apart.items()}
        if not mean:
            continue
        best = min(mean, key=lambda version: mean[version])
        if best != tag and tag in mean and mean[tag] > 1.15 * mean[best] and errors[tag] >= errors[best]:
            fits[tag.item()] = best
    if not fits:
        return None
    told = ", ".join(f"tag {tag}: version {best}" for tag, best in list(fits.items())[:4])
    stuck = len(fits) > 1 and len(set(fits.values())) == 1
    return Cause(
        name="stale engine weights" if stuck else "wrong version scored",
        confidence=0.9,
        because=f"the rollout's logprobs fit another version than the one that they are tagged with ({told})",
        advice="The engine keeps answering from old weights: the update did not reach it, or is smaller than its precision resolves."
        if stuck
        else "The tag is published before or after the weights: read it from the weights that sampled, and score under that version.",
    )


def _boundary(scene: _Scene) -> Cause | None:
    row = {bucket.label: bucket for bucket in scene.buckets.get("since_resume", ())}
    inside = row.get("8+") or row.get("before any")
    near = [row[label] for label in ("0", "1", "2-7") if label in row]
    if inside is None or not near:
        return None
    worst = max(near, key=lambda bucket: bucket.abs_diff.value)
    if worst.abs_diff.value < _ROUNDING:
        return None
    ratio = worst.abs_diff.value / inside.abs_diff.value if inside.abs_diff.value > 0 else math.inf
    if not (ratio > 2 and worst.abs_diff.low > inside.abs_diff.high):
        return None
    return Cause(
        name="resume boundary",
        confidence=_beyond(ratio, 2),
        because=f"mean |d| is {worst.abs_diff.value:.2g} at {worst.label} tokens after a resume and {inside.abs_diff.value:.2g}"
        " away from it",
        advice="The resumed call saw another context or other weights than the trainer scores: check the resume prompt, the kept"
        " KV cache and the segment's version.",
    )


def _replica(scene: _Scene) -> Cause | None:
    pairs = scene.pairs
    if "replica" not in pairs.sides or not scene.signs.tokens:
        return None
    size = np.nan_to_num(abs_diff(pairs))
    means = np.add.reduceat(size, pairs.starts) / pairs.lengths
    replica = pairs.sides["replica"][pairs.starts]
    told = known(replica)
    means, replica = means[told], replica[told]
    names = np.unique(replica)
    if len(names) < 2:
        return None
    typical = {name: float(np.median(means[replica == name])) for name in names}
    worst = max(typical, key=lambda name: typical[name])
    own, others = means[replica == worst], means[replica != worst]
    if min(len(own), len(others)) < 5 or typical[worst] < _ROUNDING:
        return None
    # ranks, not means: one heavy token must not accuse a replica
    chance = float(stats.mannwhitneyu(own, others, alternative="greater").pvalue) * len(names)
    ratio = typical[worst] / max(float(np.median(others)), 1e-300)
    if chance > 1e-3 or ratio < 1.3:
        return None
    return Cause(
        name="stale replica",
        confidence=1 - max(0.01, chance),
        because=f"sequences of replica {worst} have a median |d| of {typical[worst]:.2g}, {ratio:.1f} times that of the others"
        f" (rank test, p = {chance:.1g})",
        advice="That replica missed a weight update, or runs another configuration: compare its weights' checksum with the others'.",
    )


def _lag(scene: _Scene) -> Cause | None:
    row = scene.buckets.get("staleness", ())
    if len(row) < 2:
        return None
    fresh, oldest = row[0], row[-1]
    if oldest.abs_diff.value < _ROUNDING:
        return None
    means = [bucket.abs_diff.value for bucket in row]
    rising = np.corrcoef(np.arange(len(row)), means)[0, 1] if np.ptp(means) > 0 else 0.0
    if not (oldest.abs_diff.low > fresh.abs_diff.high and rising > 0.7):
        return None
    return Cause(
        name="staleness",
        confidence=_beyond(oldest.abs_diff.value / max(fresh.abs_diff.value, 1e-12), 1),
        because=f"mean |d| rises from {fresh.abs_diff.value:.2g} at {fresh.label} versions of age to {oldest.abs_diff.value:.2g}"
        f" at {oldest.label}",
        advice="Score each token under the weights that sampled it to see the engine mismatch alone; what rises with age is the"
        " policy's own change.",
    )


_RULES: Sequence[_Rule] = (
    _not_finite,
    _misaligned,
    _routes_moved,
    _polluted,
    _versions,
    _unrelated,
    _truncated,
    _temperature,
    _boundary,
    _replica,
    _lag,
)
_HIDES: Mapping[str, frozenset[str]] = {
    # what a misalignment makes of everything else is no second cause
    "off by one": frozenset(
        {
            "unrelated weights",
            "temperature or logprob mode",
            "truncated support (top-p or top-k)",
            "resume boundary",
            "staleness",
            "stale replica",
        }
    ),
    "unrelated weights": frozenset(
        {"temperature or logprob mode", "truncated support (top-p or top-k)", "resume boundary", "staleness", "stale replica"}
    ),
    # a temperature keeps E[rho] at 1 or above, whichever side applies it
    "truncated support (top-p or top-k)": frozenset({"temperature or logprob mode"}),
    "routes shifted by a token": frozenset({"polluted capture"}),
    "routes shifted by a layer": frozenset({"polluted capture"}),
    "routes shifted by dense layers": frozenset({"polluted capture"}),
    "stale engine weights": frozenset({"staleness"}),
    "wrong version scored": frozenset({"staleness"}),
}
CLASSES: tuple[str, ...] = (
    NUMERICS,
    "not finite",
    "off by one",
    "routes shifted by a token",
    "routes shifted by a layer",
    "routes shifted by dense layers",
    "polluted capture",
    "stale engine weights",
    "wrong version scored",
    "unrelated weights",
    "truncated support (top-p or top-k)",
    "temperature or logprob mode",
    "resume boundary",
    "stale replica",
    "staleness",
    UNEXPLAINED,
)
"""Every name that a cause may have."""
