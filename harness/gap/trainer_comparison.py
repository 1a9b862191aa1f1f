"""Comparison: two trainers' scores of one rollout, such as with and without routing replay, token
by token.

Both sides err on the same tokens, so that the ratio of their gaps is known far better than either
gap: mean |d| needs 3,000 paired tokens where two independent measurements need 7,000. Resamples
draw the same sequences for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollproof.errors import GapError
from rollproof.gap.column_checks import counted
from rollproof.gap.intervals import Interval, Resampler
from rollproof.gap.limits import GapVerdict
from rollproof.gap.metrics import NAMES, PLACE, sequence_sums
from rollproof.gap.token_pairs import BoolArray, FloatArray, TokenPairs

__all__ = ["COMPARED", "Comparison", "Effect", "compare"]

COMPARED: Mapping[str, str] = {"kl_mu_pi_k3": "k3", "abs_diff_mean": "abs"}
"""Metrics that are compared, and their columns in the sums."""
_SAME = 1e-6
"""Two recordings of one rollout may differ by a float32's rounding, and no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """A metric of one side and of the other on the same tokens; ``ratio`` is the first over the
    second.

    ``smaller`` says whether the ratio is to be below 1 (replay) or above it (a control that must do
    harm).
    """

    metric: str
    value: float
    against: float
    ratio: Interval
    smaller: bool = True

    @property
    def verdict(self) -> GapVerdict:
        """Pass or fail where the ratio's whole interval lies on one side of 1; pass where neither
        side has a gap.
        """
        if self.smaller and self.value == 0:
            return GapVerdict.PASS
        low, high = (
            (self.ratio.low, self.ratio.high)
            if self.smaller
            else (-self.ratio.high, -self.ratio.low)
        )
        bound = 1.0 if self.smaller else -1.0
        if high < bound:
            return GapVerdict.PASS
        return GapVerdict.FAIL if low > bound else GapVerdict.INCONCLUSIVE

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        ends = {"ratio": self.ratio.value, "low": self.ratio.low, "high": self.ratio.high}
        return {
            "metric": self.metric,
            "value": self.value,
            "against": self.against,
            **{name: end if np.isfinite(end) else None for name, end in ends.items()},
            "wanted": "below 1" if self.smaller else "above 1",
            "verdict": str(self.verdict),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Effects on ``tokens`` tokens of ``sequences`` sequences that all sides score.

    ``effects`` are those of the compared scores over those of ``against``; ``controls`` those of
    each negative control (routes shifted by a token, by a layer, permuted) over those of
    ``against``, which must come out above 1: replay that does no harm with wrong routes does no
    good with the right ones.
    """

    against: str
    tokens: int
    sequences: int
    effects: tuple[Effect, ...]
    controls: Mapping[str, tuple[Effect, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> GapVerdict:
        """Fail where one effect fails, else inconclusive where one is, else pass."""
        found = [
            effect.verdict
            for effect in (
                *self.effects,
                *(effect for row in self.controls.values() for effect in row),
            )
        ]
        for verdict in (GapVerdict.FAIL, GapVerdict.INCONCLUSIVE):
            if verdict in found:
                return verdict
        return GapVerdict.PASS

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "against": self.against,
            "verdict": str(self.verdict),
            "n_tokens": self.tokens,
            "n_sequences": self.sequences,
            "effects": [effect.to_dict() for effect in self.effects],
            "controls": {
                name: [effect.to_dict() for effect in row] for name, row in self.controls.items()
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
    """``pairs`` over ``against``, and each of ``controls`` over ``against``: the same rollout,
    scored otherwise.

    Sequences are matched by name; those that a side lacks are left out, and so are tokens without a
    finite logprob on every side. Raises ``GapError`` where nothing matches, or where the matched
    tokens are not of one rollout.
    """
    everyone = {"the compared records": pairs, name: against, **(controls or {})}
    sides, common, left_out = _matched(everyone)
    finite = np.logical_and.reduce(
        [np.isfinite(side.rollout) & np.isfinite(side.trainer) for side in sides.values()]
    )
    lost = int((~finite).sum())
    if not finite.any():
        raise GapError(
            "No token has a finite logprob on every side, so there is nothing to compare."
        )
    sums = {side: sequence_sums(found.chosen(finite)) for side, found in sides.items()}
    first, base = sums.pop("the compared records"), sums.pop(name)
    notes = [f"{counted(left_out, 'sequence')} not on every side: left out."] if left_out else []
    notes += (
        [f"{counted(lost, 'token')} without a finite logprob on every side: left out."]
        if lost
        else []
    )
    return Comparison(
        against=name,
        tokens=int(finite.sum()),
        sequences=common,
        effects=_effects(first, base, resamples=resamples, seed=seed),
        controls={
            side: _effects(own, base, resamples=resamples, seed=seed, smaller=False)
            for side, own in sums.items()
        },
        notes=tuple(notes),
    )


def _effects(
    first: FloatArray, base: FloatArray, *, resamples: int, seed: int, smaller: bool = True
) -> tuple[Effect, ...]:
    both = np.hstack([first, base])
    resampler = Resampler(both, resamples=resamples, seed=seed)
    out = []
    for metric, column in COMPARED.items():
        here, there = PLACE[column], len(NAMES) + PLACE[column]
        tokens = resampler.total[PLACE["finite"]]
        value, other = float(resampler.total[here] / tokens), float(resampler.total[there] / tokens)
        out.append(
            Effect(
                metric=metric,
                value=value,
                against=other,
                ratio=resampler.ratio(here, there),
                smaller=smaller,
            )
        )
    return tuple(out)


def _matched(everyone: Mapping[str, TokenPairs]) -> tuple[dict[str, TokenPairs], int, int]:
    """Each side's pairs of the sequences that all have, in one order; how many those are, and how
    many some side lacks.
    """
    names = {
        side: {str(sequence): i for i, sequence in enumerate(pairs.sequences)}
        for side, pairs in everyone.items()
    }
    common = set.intersection(*(set(own) for own in names.values()))
    if not common:
        told = "; ".join(
            f"{side}: {', '.join(list(own)[:3]) or 'none'}" for side, own in names.items()
        )
        raise GapError(
            f"No sequence_id is on every side ({told}): a comparison needs the same rollout, scored"
            " twice."
        )
    order = sorted(common)
    sides = {
        side: _ordered(pairs, [names[side][sequence] for sequence in order])
        for side, pairs in everyone.items()
    }
    first_name, first = next(iter(sides.items()))
    for side, pairs in sides.items():
        _same_rollout(first, pairs, order, first_name, side)
    return sides, len(order), len(set.union(*(set(own) for own in names.values()))) - len(order)


def _ordered(pairs: TokenPairs, sequences: list[int]) -> TokenPairs:
    """Only the columns that a comparison needs, the sequences in the order given."""
    lengths = pairs.lengths[sequences]
    starts = np.cumsum(lengths) - lengths
    rows = np.repeat(pairs.starts[sequences] - starts, lengths) + np.arange(int(lengths.sum()))
    ids = {"token_id": pairs.sides["token_id"][rows]} if "token_id" in pairs.sides else {}
    return TokenPairs(
        rollout=pairs.rollout[rows],
        trainer=pairs.trainer[rows],
        starts=starts,
        sequences=[pairs.sequences[i] for i in sequences],
        sides=ids,
    )


def _same_rollout(
    first: TokenPairs, other: TokenPairs, order: list[str], first_name: str, name: str
) -> None:
    if not np.array_equal(first.lengths, other.lengths):
        at = int(np.flatnonzero(first.lengths != other.lengths)[0])
        raise GapError(
            f"Sequence {order[at]} has {counted(int(first.lengths[at]), 'unmasked token')} in"
            f" {first_name} and {other.lengths[at]:,} in {name}: a comparison needs the same tokens"
            " under the same mask, scored twice."
        )
    with np.errstate(invalid="ignore"):  # what is not finite is left out later, and told
        wrong: BoolArray = np.abs(first.rollout - other.rollout) > _SAME * np.maximum(
            1.0, np.abs(first.rollout)
        )
    if "token_id" in first.sides and "token_id" in other.sides:
        wrong |= first.sides["token_id"] != other.sides["token_id"]
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise GapError(
            f"{first_name} and {name} hold different rollouts: {counted(int(wrong.sum()), 'token')}"
            " with another token_id or rollout_logprob, the first in sequence"
            f" {first.where(at)['sequence']}. Score the tokens of one rollout on both sides."
        )
