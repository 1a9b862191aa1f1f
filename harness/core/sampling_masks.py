"""Sampling masks: the tokens among which a sampler drew each token of a response.

A sampler that leaves tokens out (top_k, top_p, min_p) draws from a renormalised distribution. A
trainer that takes the probability among all tokens has another one, and with it biased importance
ratios; so engines return the tokens that were left, their *support*, and trainers renormalise over
it (vLLM #49577, SGLang #27408, prime-rl #3431).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rollproof.core.error_text import show
from rollproof.core.number_arrays import INTEGERS, to_array
from rollproof.errors import SubjectError, UsageError

__all__ = ["SamplingMask", "as_sampling_mask", "is_greedy", "leaves_tokens_out"]

_Integers = npt.NDArray[np.integer[Any]]
_ID_BITS, _LOW_BITS = 32, (1 << 32) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingMask:
    """The tokens among which each token was drawn, its own included.

    Attributes:
        counts: ``(tokens,)``: how many ids each token has; 0: it has no mask (the environment's,
            or one that was drawn among all tokens).
        token_ids: ``(counts.sum(),)``: the ids, token by token. Their order within one mask means
            nothing.
    """

    counts: _Integers
    token_ids: _Integers

    @classmethod
    def from_lists(cls, masks: Iterable[Sequence[int]]) -> Self:
        """Return the masks of tokens of which each has a list of ids (SGLang's form)."""
        listed = list(masks)
        ids = [token for mask in listed for token in mask]
        return cls(
            counts=np.array([len(mask) for mask in listed], dtype=np.int64),
            token_ids=np.array(ids, dtype=np.int64),
        )

    @classmethod
    def from_offsets(cls, token_ids: Sequence[int], offsets: Sequence[int]) -> Self:
        """Return the masks of tokens of which number i has ``token_ids[offsets[i]:offsets[i + 1]]``
        (vLLM's form).
        """
        return cls(
            counts=np.diff(np.array(offsets, dtype=np.int64)).astype(np.int64),
            token_ids=np.array(token_ids, dtype=np.int64),
        )

    @classmethod
    def none(cls, tokens: int) -> Self:
        """Return what ``tokens`` tokens without a mask have."""
        return cls(counts=np.zeros(tokens, dtype=np.int64), token_ids=np.zeros(0, dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[SamplingMask]) -> Self:
        """Return the masks of consecutive tokens, in order."""
        first = cls.none(0)
        return cls(
            counts=np.concatenate([first.counts, *(part.counts for part in parts)]),
            token_ids=np.concatenate([first.token_ids, *(part.token_ids for part in parts)]),
        )

    def __len__(self) -> int:
        """Return the number of tokens, with or without a mask."""
        return len(self.counts)

    @property
    def fits(self) -> bool:
        """Whether the counts are those of the ids: a file or an engine may say anything."""
        counts, ids = self.counts, self.token_ids
        if counts.ndim != 1 or ids.ndim != 1:
            return False
        # a sum of 64 bits may wrap around to the number of ids
        if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) <= len(ids):
            return False
        return int(counts.sum(dtype=np.float64)) == len(ids)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """``(tokens + 1,)``: the first id of each token, and the number of ids."""
        offsets = np.zeros(len(self.counts) + 1, dtype=np.int64)
        np.cumsum(self.counts, out=offsets[1:])
        return offsets

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """``(ids,)``: the token to which each id belongs."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def copy(self) -> Self:
        """Return the same with arrays of its own."""
        return type(self)(counts=self.counts.copy(), token_ids=self.token_ids.copy())

    def cut(self, start: int, stop: int) -> Self:
        """Return the masks of the tokens from ``start`` (inclusive) to ``stop`` (exclusive), or to
        the end if there are fewer.
        """
        return self.split([(start, stop)])[0]

    def split(self, stretches: Iterable[tuple[int, int]]) -> list[Self]:
        """Return ``cut`` of each pair of ``start`` and ``stop``: views of the arrays."""
        offsets, end = self.offsets, len(self.counts)
        return [
            type(self)(
                counts=self.counts[start:stop],
                token_ids=self.token_ids[offsets[min(start, end)] : offsets[min(stop, end)]],
            )
            for start, stop in stretches
        ]

    def ids_of(self, token: int) -> tuple[int, ...]:
        """Return the ids of one token's mask, ascending."""
        return tuple(sorted(self.cut(token, token + 1).token_ids.tolist()))

    def find(self, ids: Sequence[int]) -> int | None:
        """Return the first token whose mask has these ids, in any order; ``None`` if none has."""
        alike = self.counts == len(ids)
        tokens = np.flatnonzero(alike)
        if not len(ids):
            return None
        wanted = SamplingMask(
            counts=np.full(len(tokens), len(ids)), token_ids=np.tile(np.array(ids), len(tokens))
        )
        found = tokens[self.only(alike).equal(wanted)]
        return int(found[0]) if len(found) else None

    def holds(self, tokens: Sequence[int] | _Integers) -> npt.NDArray[np.bool_]:
        """Return ``(tokens,)``: which of the masks have the id of ``tokens`` at their place."""
        owners = self.owners
        found = np.zeros(len(self.counts), dtype=bool)
        found[owners[self.token_ids == np.asarray(tokens, dtype=np.int64)[owners]]] = True
        return found

    def renormalised(
        self, scores: npt.ArrayLike, tokens: Sequence[int] | _Integers
    ) -> npt.NDArray[np.float64]:
        """Return the log-probability of each token among the ids of its mask, as a trainer has it:
        ``(tokens,)``. Among all ids for a token without a mask; -inf if the mask lacks the token.

        Args:
            scores: ``(tokens, vocab)``: logits, or log-probabilities, at the temperature of the
                call.
            tokens: The sampled tokens.

        Raises:
            UsageError: The sizes differ, or an id is not below ``vocab``.
        """
        values, ids = np.asarray(scores, dtype=np.float64), np.asarray(tokens, dtype=np.int64)
        if values.ndim != 2 or not len(values) == len(ids) == len(self):
            raise UsageError(
                f"Scores of the shape {values.shape}, {len(ids)} tokens and {len(self)} masks:"
                " scores must be (tokens, vocab), with one token and one mask each."
            )
        for listed in (ids, self.token_ids):
            if len(listed) and not 0 <= int(listed.min()) <= int(listed.max()) < values.shape[1]:
                raise UsageError(f"Ids must be 0 to {values.shape[1] - 1}, as the scores have.")
        masked = self.counts > 0
        totals = np.full(len(ids), -np.inf)
        if masked.any():
            # consecutive starts, because tokens without a mask have no ids
            totals[masked] = np.logaddexp.reduceat(
                values[self.owners, self.token_ids], self.offsets[:-1][masked]
            )
        totals[~masked] = np.logaddexp.reduce(values[~masked], axis=1)
        chosen = values[np.arange(len(ids)), ids] - totals
        return np.where(masked & ~self.holds(ids), -np.inf, chosen)

    def equal(self, other: SamplingMask) -> npt.NDArray[np.bool_]:
        """Return ``(tokens,)``: which masks of as many tokens have the same ids, in any order."""
        same = np.asarray(self.counts == other.counts)
        # the usual case, a copy, needs no sorting
        if same.all() and np.array_equal(self.token_ids, other.token_ids):
            return same
        alike = [mask.only(same) for mask in (self, other)]
        first, second = (mask._ascending() for mask in alike)
        same = same.copy()
        same[np.flatnonzero(same)[alike[0].owners[first != second]]] = False
        return same

    def only(self, tokens: npt.NDArray[np.bool_]) -> SamplingMask:
        """Return the masks of some tokens: ``(tokens,)`` says of which."""
        return SamplingMask(
            counts=self.counts[tokens], token_ids=self.token_ids[np.repeat(tokens, self.counts)]
        )

    def _ascending(self) -> _Integers:
        ids = self.token_ids
        if len(ids) and int(ids.min()) >= 0 and int(ids.max()) <= _LOW_BITS:
            # one sort of numbers takes a tenth of the time of one by two keys
            keys = self.owners << _ID_BITS | ids.astype(np.int64)
            keys.sort()
            return keys & _LOW_BITS
        return self.token_ids[np.lexsort((self.token_ids, self.owners))]


def as_sampling_mask(value: Any, *, what: str = "sampling_mask") -> SamplingMask | None:
    """Return a ``SamplingMask`` with arrays of its own, of one or of a list of ids for each token;
    ``None`` stays ``None``.

    Raises:
        SubjectError: ``value`` is anything else, a count is negative, or the counts do not add up
            to the number of ids; the text calls it ``what``.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple):
        value = _of_lists(value, what)
    if not isinstance(value, SamplingMask):
        raise SubjectError(
            f"{what} must be a SamplingMask, or a list with the ids of each token, not"
            f" {type(value).__name__}."
        )
    counts = to_array(value.counts, name=f"{what}.counts", rank=1, numbers=INTEGERS)
    ids = to_array(value.token_ids, name=f"{what}.token_ids", rank=1, numbers=INTEGERS)
    negative = np.flatnonzero(counts < 0)
    if len(negative):
        raise SubjectError(
            f"{what}.counts[{negative[0]}] must be a number of ids, not {counts[negative[0]]}."
        )
    mask = SamplingMask(counts=counts, token_ids=ids)
    if not mask.fits:
        raise SubjectError(
            f"{what}.counts must add up to the number of ids, {len(ids)}, not to"
            f" {show(sum(counts.tolist()))}."
        )
    return mask


def _of_lists(masks: Sequence[Any], what: str) -> SamplingMask:
    arrays = [
        to_array(
            # a token without a mask, in the form of some engines
            () if mask is None else mask,
            name=f"{what}[{place}]",
            rank=1,
            numbers=INTEGERS,
        )
        for place, mask in enumerate(masks)
    ]
    return SamplingMask(
        counts=np.array([len(ids) for ids in arrays], dtype=np.int64),
        token_ids=np.concatenate([np.zeros(0, dtype=np.int64), *arrays]),
    )


def is_greedy(sampling: Mapping[str, object]) -> bool:
    """Return whether a call takes the most probable tokens, so that its siblings are equal."""
    return sampling.get("temperature") == 0 or sampling.get("top_k") == 1


def leaves_tokens_out(sampling: Mapping[str, object]) -> bool:
    """Return whether a call with these parameters draws among some tokens alone. A greedy call does
    not draw at all.
    """
    top_k, top_p, min_p = (
        _number(sampling.get(name), default)
        for name, default in (("top_k", -1.0), ("top_p", 1.0), ("min_p", 0.0))
    )
    # 0 and -1 switch top_k off in vLLM, -1 in SGLang
    return not is_greedy(sampling) and (top_k > 0 or top_p < 1 or min_p > 0)


def _number(value: object, default: float) -> float:
    # a caller may pass anything, and None for "the default"
    return float(value) if isinstance(value, int | float) else default
