"""Comparison of two trainers' scores of one rollout, such as with and without routing replay.

Both err on the same tokens, so the ratio of their gaps is far more certain than either gap: mean
|d| needs 3,000 paired tokens where two independent measurements need 7,000. Resamples draw the same
sequences for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollproof.errors import GapError
from rollproof.gap.column_checks import BoolArray, FloatArray, counted
from rollproof.gap.intervals import Interval, Resampler
from rollproof.gap.limits import GapVerdict
from rollproof.gap.metrics import NAMES, PLACE, sequence_sums
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["COMPARED", "Comparison", "Effect", "compare"]

COMPARED: Mapping[str, str] = {"kl_mu_pi_k3": "k3", "abs_diff_mean": "abs"}
"""Metrics that are compared, and their columns in the sums."""
# Two recordings of one rollout may differ by a float32's rounding, and no more
_TOLERANCE = 1e-6
_COMPARED_NAME = "the compared records"


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """A metric of two scores of the same tokens.

    Attributes:
        metric: its name.
        value: of the compared score.
        against: of the score that it is compared with.
        ratio: ``value`` over ``against``.
        smaller: whether the ratio should be below 1 (replay) or above it (a control that must do
            harm).
    """

    metric: str
    value: float
    against: float
    ratio: Interval
    smaller: bool = True

    @property
    def verdict(self) -> GapVerdict:
        """Pass or fail if the whole interval lies on one side of 1; pass if there is no gap."""
        if self.smaller and self.value == 0:
            return GapVerdict.PASS
        below, above = self.ratio.high < 1.0, self.ratio.low > 1.0
        if below if self.smaller else above:
            return GapVerdict.PASS
        if above if self.smaller else below:
            return GapVerdict.FAIL
        return GapVerdict.INCONCLUSIVE

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        ratio, low, high = self.ratio.to_list()
        return {
            "metric": self.metric,
            "value": self.value,
            "against": self.against,
            "ratio": ratio,
            "low": low,
            "high": high,
            "wanted": "below 1" if self.smaller else "above 1",
            "verdict": str(self.verdict),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Effects on the tokens that all scores have.

    Attributes:
        against: the name of the score that is compared with.
        tokens: the common tokens.
        sequences: the common sequences.
        effects: those of the compared scores.
        controls: those of each negative control (routes shifted by a token, by a layer, permuted),
            which must come out above 1: if wrong routes do no harm, right ones do no good.
        notes: what was left out.
    """

    against: str
    tokens: int
    sequences: int
    effects: tuple[Effect, ...]
    controls: Mapping[str, tuple[Effect, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> GapVerdict:
        """Fail if one effect fails, else inconclusive if one is, else pass."""
        controls = [effect for effects in self.controls.values() for effect in effects]
        verdicts = {effect.verdict for effect in (*self.effects, *controls)}
        for verdict in (GapVerdict.FAIL, GapVerdict.INCONCLUSIVE):
            if verdict in verdicts:
                return verdict
        return GapVerdict.PASS

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "against": self.against,
            "verdict": str(self.verdict),
            "n_tokens": self.tokens,
            "n_sequences": self.sequences,
            "effects": [effect.to_dict() for effect in self.effects],
            "controls": {
                name: [effect.to_dict() for effect in effects]
                for name, effects in self.controls.items()
            },
            "notes": list(self.notes),
        }


def compare(
    pairs: TokenPairs,
    against: TokenPairs,
    *,
    controls: Mapping[str, TokenPairs] | None = None,
    name: str = "without replay",
    resamples: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Compare ``pairs`` and each of ``controls`` with ``against``: one rollout, scored differently.

    Sequences are matched by name. Sequences that one of them lacks are left out, and so are tokens
    without a finite logprob in one of them. Raises ``GapError`` if nothing matches, or if the
    matched tokens are not of one rollout.
    """
    scores = {_COMPARED_NAME: pairs, name: against, **(controls or {})}
    matched, sequences, unmatched = _match_sequences(scores)
    finite = np.logical_and.reduce([own.finite for own in matched.values()])
    nonfinite = int((~finite).sum())
    if not finite.any():
        raise GapError(
            "No token has a finite logprob on every side, so there is nothing to compare."
        )
    sums = {score: sequence_sums(own.select(finite)) for score, own in matched.items()}
    compared, base = sums.pop(_COMPARED_NAME), sums.pop(name)
    notes = []
    if unmatched:
        notes.append(f"{counted(unmatched, 'sequence')} not on every side: left out.")
    if nonfinite:
        notes.append(
            f"{counted(nonfinite, 'token')} without a finite logprob on every side: left out."
        )
    return Comparison(
        against=name,
        tokens=int(finite.sum()),
        sequences=sequences,
        effects=_effects(compared, base, resamples=resamples, seed=seed),
        controls={
            control: _effects(own, base, resamples=resamples, seed=seed, smaller=False)
            for control, own in sums.items()
        },
        notes=tuple(notes),
    )


def _effects(
    compared: FloatArray, base: FloatArray, *, resamples: int, seed: int, smaller: bool = True
) -> tuple[Effect, ...]:
    resampler = Resampler(np.hstack([compared, base]), resamples=resamples, seed=seed)
    tokens = resampler.total[PLACE["finite"]]
    effects = []
    for metric, column in COMPARED.items():
        above, below = PLACE[column], len(NAMES) + PLACE[column]
        effects.append(
            Effect(
                metric=metric,
                value=float(resampler.total[above] / tokens),
                against=float(resampler.total[below] / tokens),
                ratio=resampler.ratio(above, below),
                smaller=smaller,
            )
        )
    return tuple(effects)


def _match_sequences(
    scores: Mapping[str, TokenPairs],
) -> tuple[dict[str, TokenPairs], int, int]:
    """Return the pairs of the sequences that all scores have, in one order.

    Also how many sequences those are, and how many some score lacks.
    """
    indexes = {
        score: {str(sequence): i for i, sequence in enumerate(pairs.sequences)}
        for score, pairs in scores.items()
    }
    common = set.intersection(*(set(names) for names in indexes.values()))
    if not common:
        samples = "; ".join(
            f"{score}: {', '.join(list(names)[:3]) or 'none'}" for score, names in indexes.items()
        )
        raise GapError(
            f"No sequence_id is on every side ({samples}): a comparison needs the same rollout,"
            " scored twice."
        )
    order = sorted(common)
    matched = {
        score: _reordered(pairs, [indexes[score][sequence] for sequence in order])
        for score, pairs in scores.items()
    }
    first_name, first = next(iter(matched.items()))
    for score, pairs in matched.items():
        _require_same_rollout(first, pairs, order, first_name, score)
    everything = set.union(*(set(names) for names in indexes.values()))
    return matched, len(order), len(everything) - len(order)


def _reordered(pairs: TokenPairs, sequences: list[int]) -> TokenPairs:
    """Return the columns that a comparison needs, with the sequences in the given order."""
    lengths = pairs.lengths[sequences]
    starts = np.cumsum(lengths) - lengths
    rows = np.repeat(pairs.starts[sequences] - starts, lengths) + np.arange(int(lengths.sum()))
    columns = pairs.columns
    return TokenPairs(
        rollout=pairs.rollout[rows],
        trainer=pairs.trainer[rows],
        starts=starts,
        sequences=[pairs.sequences[i] for i in sequences],
        columns={"token_id": columns["token_id"][rows]} if "token_id" in columns else {},
    )


def _require_same_rollout(
    first: TokenPairs, other: TokenPairs, order: list[str], first_name: str, name: str
) -> None:
    if not np.array_equal(first.lengths, other.lengths):
        at = int(np.flatnonzero(first.lengths != other.lengths)[0])
        raise GapError(
            f"Sequence {order[at]} has {counted(int(first.lengths[at]), 'unmasked token')} in"
            f" {first_name} and {other.lengths[at]:,} in {name}: a comparison needs the same tokens"
            " under the same mask, scored twice."
        )
    tolerance = _TOLERANCE * np.maximum(1.0, np.abs(first.rollout))
    with np.errstate(invalid="ignore"):  # tokens that are not finite are left out later
        wrong: BoolArray = np.abs(first.rollout - other.rollout) > tolerance
    if "token_id" in first.columns and "token_id" in other.columns:
        wrong |= first.columns["token_id"] != other.columns["token_id"]
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise GapError(
            f"{first_name} and {name} hold different rollouts: {counted(int(wrong.sum()), 'token')}"
            " with another token_id or rollout_logprob, the first in sequence"
            f" {first.describe(at)['sequence']}. Score the tokens of one rollout on both sides."
        )
