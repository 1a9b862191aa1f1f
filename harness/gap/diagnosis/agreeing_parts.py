"""Parts of the tokens that agree where most have little in common: both sides have the weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollproof.gap.buckets import bucket_codes, resume_parts
from rollproof.gap.column_checks import BoolArray, counted
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["APART", "agreeing_parts"]

APART = 0.15
"""Share of tokens apart by a factor of 2 from which two sides have little in common."""
# A part agrees below this share, with logprobs that correlate by this much
_AGREE = 0.1
_CORRELATION = 0.9
_MIN_TOKENS = 100
# Tokens from which a single sequence is judged, and the share of sequences that is a part
_SEQUENCE = 30
_MIN_SHARE = 0.05
_LISTED = 3


def agreeing_parts(pairs: TokenPairs) -> str:
    """Return the parts of the tokens that agree, in words; ``""`` if none does."""
    apart = np.abs(pairs.trainer - pairs.rollout) > np.log(2)
    found = []
    for name, tokens in _parts(pairs):
        if tokens.sum() >= _MIN_TOKENS and apart[tokens].mean() < _AGREE:
            rollout, trainer = pairs.rollout[tokens], pairs.trainer[tokens]
            if min(np.ptp(rollout), np.ptp(trainer)) > 0 and (
                np.corrcoef(rollout, trainer)[0, 1] > _CORRELATION
            ):
                found.append(name)
    # in sequences that are not apart at all the correlation of few tokens says little
    share = np.add.reduceat(apart.astype(np.float64), pairs.starts) / pairs.lengths
    long = pairs.lengths >= _SEQUENCE
    agreeing = int((share[long] < _AGREE).sum())
    if not found and agreeing > max(1, _MIN_SHARE * long.sum()):
        found.append(f"{agreeing:,} of {counted(int(long.sum()), 'sequence')}")
    verb = "agrees" if len(found) == 1 and not found[0][0].isdigit() else "agree"
    return f"{', '.join(found[:_LISTED])} {verb}" if found else ""


def _parts(pairs: TokenPairs) -> Iterator[tuple[str, BoolArray]]:
    """Yield parts that one cause may spare: places, columns with labels, groups."""
    lengths = np.repeat(pairs.lengths, pairs.lengths)
    third = 3 * pairs.index_in_sequence // np.maximum(lengths, 1)
    for number, name in enumerate(("first", "middle", "last")):
        yield f"the {name} third of the sequences", np.asarray(third == number)
    if "pack_index" in pairs.columns:
        first = np.asarray(pairs.columns["pack_index"] == 0)
        yield "the first sequence of each packed row", first
    if "since_resume" in pairs.columns:
        yield "what precedes any resume", resume_parts(pairs.columns["since_resume"])["before any"]
    for name in ("replica", "version", "part"):
        if name in pairs.columns:
            codes, labels = bucket_codes(pairs.columns[name])
            for code, label in enumerate(labels):
                yield f"{name} {label}", np.asarray(codes == code)
    for name, grouping in pairs.groups.items():
        for code, label in enumerate(grouping.labels):
            yield f"{name} {label}", grouping.members(code)
