"""Coded policy: next token, logprob and experts as pure functions of weight version, token ids so
far and layer.

Every cell of a coded trace has an oracle, and tells from its value alone which request, position,
layer and version produced it. So faults that keep every shape right (a row recomputed under new
weights, rows swapped between two requests, an off-by-one) are seen and named.

How it is coded. The ids up to position i have the 64-bit prefix hash ``H_i = sum_j mix(ids[j], j)``
(a sum, so that ``np.cumsum`` computes a whole sequence). What version v does there is drawn from
``h = finish(H + key(v, what))``. The experts of layer l are line ``(h * m_l) >> 50`` of a table of
2**14 ordered draws of k distinct experts, ``m_l`` odd and random. Nothing else is looked up, so two
rows share cells only by chance.

How often two values coincide although they should differ:

==================  =====================================================================================
prefix hash         2**-64 per pair of different prefixes
cell of one layer   about 1/p + 2**-14 with p = E!/(E-k)! ordered draws (E = 128, k = 8: 6e-5; E = 8, k = 2: 0.018)
row                 that to the power of the number of MoE layers (E = 8, k = 2, three layers: 6e-6)
logprob             2**-23; values lie on a grid that float32 holds exactly
token               about 1/(vocab - 1)
==================  =====================================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray, LogprobArray, Version
from rollproof.errors import CaseError, UsageError
from rollproof.fakes.coded.hashing import (
    F1,
    F2,
    MASK,
    MIX,
    N_STEP,
    STEP,
    Hashes,
    finish,
    hashes_of_many,
    prefix_hashes,
)
from rollproof.fakes.coded.lanes import draw_lanes
from rollproof.fakes.coded.singly import follow_overrides
from rollproof.fakes.coded.table import TABLE_BITS, cells_of

if TYPE_CHECKING:
    from rollproof.core.case import Model

__all__ = ["CodedPolicy", "State", "Stretch", "VersionSpan", "mixed_key"]

State: TypeAlias = "tuple[int, int]"
"""Opaque state of a sequence: its prefix hash and its length."""
VersionSpan: TypeAlias = "tuple[int, int, Version]"
"""Positions ``start`` (inclusive) to ``stop`` (exclusive) belong to a version."""
Stretch: TypeAlias = "tuple[Iterable[VersionSpan], Sequence[int], int, int]"
"""Of a sequence the positions ``start`` to ``stop``, each under the version whose span holds it:
spans, ids, start, stop.
"""

_N32, _N_LOW = (np.uint64(number) for number in (32, 0xFFFFFFFF))
_TABLE_SHIFT = np.uint64(64 - TABLE_BITS)
_BLOCK_CELLS = 1 << 14
"""Cells computed at once: the scratch of a block and the table stay in the second-level cache."""
_LOGPROB_SHIFT, _LOGPROB_UNIT = np.uint64(64 - 23), 2.0**-20
_LIMITS: Mapping[str, tuple[int, int]] = {
    "seed": (-(1 << 63), MASK),
    "vocab": (2, 1 << 31),
    "num_layers": (1, 4096),
    "num_experts": (1, 1 << 20),
    "top_k": (1, 64),
    "eos_every": (1, 1 << 31),
    "eos_id": (0, (1 << 31) - 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedPolicy:
    """A policy whose every value is coded; an ``Oracle``, and the sampler of the fake engines.

    ``vocab`` token ids from 0, ``moe_layers`` global layer indexes (the columns of the other, dense
    layers are zeros), ``eos_every``: on average one token in this many is ``eos_id`` (``None``:
    never). Equal fields make equal policies. A version is an int, a str, or a ``mixed_key``. Raises
    ``CaseError`` for sizes out of bounds.

    Of a subclass an engine asks ``logprobs_spans``, ``routes_spans``, and ``draw`` or what that
    consists of, ``next_token`` and ``extend``: to override one of these is enough, for what asks
    for many at once then asks for one after the other.
    """

    seed: int
    vocab: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    eos_every: int | None = None
    eos_id: int = 0
    _keys: dict[Version, tuple[int, int, int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super(CodedPolicy, cls).__init_subclass__(
            **kwargs
        )  # by name: a class with slots is made twice, and plain super() means the first
        follow_overrides(cls)

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be a whole number from {low} to {high}."
            for name, (low, high) in _LIMITS.items()
            if not (name == "eos_every" and self.eos_every is None)
            and not _within(getattr(self, name), low, high)
        ]
        if not problems:
            moe = self.moe_layers
            if (
                not isinstance(moe, tuple)
                or any(not _within(layer, 0, self.num_layers - 1) for layer in moe)
                or list(moe) != sorted(set(moe))
            ):
                problems.append(
                    "moe_layers must be a tuple of ascending, distinct layers below"
                    f" num_layers={self.num_layers}."
                )
            if self.top_k > self.num_experts:
                problems.append(
                    f"top_k={self.top_k} exceeds num_experts={self.num_experts}: a token cannot"
                    " have that many distinct experts."
                )
            if self.eos_id >= self.vocab:
                problems.append(f"eos_id={self.eos_id} must be below vocab={self.vocab}.")
        if problems:
            raise CaseError("The coded policy cannot be made:\n  - " + "\n  - ".join(problems))

    @staticmethod
    def from_model(model: Model, seed: int) -> CodedPolicy:
        """The policy that stands for a case's model."""
        return _made(
            seed=seed,
            vocab=model.vocab,
            num_layers=model.num_layers,
            moe_layers=tuple(model.moe_layers),
            num_experts=model.num_experts,
            top_k=model.top_k,
            eos_every=model.eos_every,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; ``from_dict`` is its inverse."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in _names()
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote, or what a stranger did. Raises ``CaseError`` for keys or
        numbers that cannot be.
        """
        if not isinstance(mapping, Mapping):
            raise CaseError(f"A coding must be a mapping, not {type(mapping).__name__}.")
        stray = sorted(str(key) for key in set(mapping) - set(_names()))
        missing = [
            name for name in _names() if name not in mapping and name not in ("eos_every", "eos_id")
        ]
        if stray or missing:
            raise CaseError(
                f"This coding has unknown keys {stray[:8]} and lacks {missing}; its keys are"
                f" {list(_names())}."
            )
        values = dict(mapping)
        layers = values["moe_layers"]
        if not isinstance(layers, list | tuple) or len(layers) > _LIMITS["num_layers"][1]:
            raise CaseError(
                f"moe_layers must be a list of at most {_LIMITS['num_layers'][1]} layers."
            )
        return cls(**{**values, "moe_layers": tuple(layers)})

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer type that holds every expert id."""
        return np.dtype(np.min_scalar_type(self.num_experts - 1))

    def start_state(self, ids: Sequence[int]) -> State:
        """State of a sequence after ``ids``."""
        return (int(prefix_hashes(ids)[-1]) if len(ids) else 0, len(ids))

    def extend(self, state: State, token: int) -> State:
        """State after one more token; the same as ``start_state`` of the longer sequence."""
        total, position = state
        z = (token + (position + 1) * STEP) & MASK
        z = (z ^ z >> 31) * MIX & MASK
        return ((total + (z ^ z >> 33)) & MASK, position + 1)

    def next_token(self, version: Version, state: State) -> int:
        """The token that ``version`` samples after the sequence: the first of its choices, in about
        half a microsecond.
        """
        keys = self._keys.get(version) or self._keys_of(version)
        z = (state[0] + keys[0]) & MASK
        z = (z ^ z >> 32) * F1 & MASK
        z = (z ^ z >> 29) * F2 & MASK
        z ^= z >> 32
        if self.eos_every is not None and (z >> 32) % self.eos_every == 0:
            return self.eos_id
        token = (z & 0xFFFFFFFF) % (self.vocab - 1)
        return token + (token >= self.eos_id)

    def draw(self, version: Version, state: State, count: int) -> tuple[list[int], State]:
        """The next ``count`` tokens, and the state after them: ``next_token`` and ``extend`` in
        turn, in half the time.
        """
        key = (self._keys.get(version) or self._keys_of(version))[0]
        rest, eos_id, eos_every = self.vocab - 1, self.eos_id, self.eos_every
        total, position = state
        tokens = []
        for _ in range(count):
            z = (total + key) & MASK
            z = (z ^ z >> 32) * F1 & MASK
            z = (z ^ z >> 29) * F2 & MASK
            z ^= z >> 32
            if eos_every is not None and (z >> 32) % eos_every == 0:
                token = eos_id
            else:
                token = (z & 0xFFFFFFFF) % rest
                token += token >= eos_id
            tokens.append(token)
            position += 1
            z = (token + position * STEP) & MASK
            z = (z ^ z >> 31) * MIX & MASK
            total = (total + (z ^ z >> 33)) & MASK
        return tokens, (total, position)

    def draw_many(
        self, version: Version, states: Sequence[State], count: int
    ) -> list[tuple[list[int], State]]:
        """``draw`` for several sequences at once: from four on, sooner than one after the other."""
        key = self._keys_of(version)[0]
        return draw_lanes(
            key, states, count, vocab=self.vocab, eos_every=self.eos_every, eos_id=self.eos_id
        )

    def choices(
        self, version: Version, ids: Sequence[int], start: int = 0
    ) -> npt.NDArray[np.int64]:
        """``next_token`` after each ``ids[:i]`` for ``i >= start``, at once: ``(len(ids) -
        start,)``.
        """
        before = np.concatenate([np.zeros(1, dtype=np.uint64), prefix_hashes(ids)])[
            start : len(ids)
        ]
        z = finish(before + np.uint64(self._keys_of(version)[0]))
        token = ((z & _N_LOW) % np.uint64(self.vocab - 1)).astype(np.int64)
        token += token >= self.eos_id
        if self.eos_every is not None:
            token[(z >> _N32) % np.uint64(self.eos_every) == 0] = self.eos_id
        return token

    def logprobs(self, version: Version, ids: Sequence[int], start: int) -> LogprobArray:
        """Log-probability of ``ids[i]`` given ``ids[:i]`` for ``i >= start``: ``(len(ids) -
        start,)``, in [-8, 0), T = 1.
        """
        return _logprobs_of(self._drawn(version, ids, start, 1))

    def routes(self, version: Version, ids: Sequence[int], start: int = 0) -> IntArray:
        """Experts of the forward of each token from ``start`` on: ``(len(ids) - start, num_layers,
        top_k)``.

        Row i depends on ``ids[:i + 1]``. The k experts of a cell are distinct; dense layers hold
        zeros.
        """
        return self.routes_of_hashes(self._drawn(version, ids, start, 2))

    def logprobs_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> LogprobArray:
        """As ``logprobs`` for positions ``start`` to ``stop``, each under the version whose span
        holds it.
        """
        return _logprobs_of(finish(self._seeds((spans, ids, start, stop), 1)))

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        """As ``routes`` for positions ``start`` to ``stop``, each under the version whose span
        holds it.

        Raises ``UsageError`` where a position has no span: a row without a version was never
        computed.
        """
        return self.routes_of_hashes(finish(self._seeds((spans, ids, start, stop), 2)))

    def logprobs_many(
        self, stretches: Sequence[Stretch], hashes: Sequence[Hashes] | None = None
    ) -> list[LogprobArray]:
        """``logprobs_spans`` of each, in one pass: most of what a short one takes, numpy takes for
        each pass.

        ``hashes`` are the ``prefix_hashes`` of their ids, where whoever asks has them: engines do.
        """
        return _parted(_logprobs_of(finish(self._seeds_many(stretches, 1, hashes))), stretches)

    def routes_many(
        self, stretches: Sequence[Stretch], hashes: Sequence[Hashes] | None = None
    ) -> list[IntArray]:
        """``routes_spans`` of each, in one pass; ``hashes`` as for ``logprobs_many``."""
        return _parted(
            self.routes_of_hashes(finish(self._seeds_many(stretches, 2, hashes))), stretches
        )

    def route_hashes(self, version: Version, ids: Sequence[int]) -> Hashes:
        """``(len(ids),)``: what ``routes_of_hashes`` expands, one number a row; equal rows have
        equal hashes.
        """
        return self._drawn(version, ids, 0, 2)

    def routes_of_hashes(self, hashes: Hashes, layers: Sequence[int] | None = None) -> IntArray:
        """Expand row hashes into ``(len(hashes), len(layers), top_k)``; ``layers`` are all layers
        unless given.
        """
        width, columns, factors = _columns(
            self.num_layers, self.moe_layers, None if layers is None else tuple(layers)
        )
        full = len(columns) == width
        table = cells_of(self.num_experts, self.top_k)
        out = (np.empty if full else np.zeros)((len(hashes), width), dtype=table.dtype)
        block = max(1, _BLOCK_CELLS // max(1, len(columns)))
        scratch = np.empty((min(block, len(hashes)), len(columns)), dtype=np.uint64)
        for low in range(0, len(hashes), block):
            part = hashes[low : low + block]
            lines = scratch[: len(part)]
            np.multiply(part[:, None], factors, out=lines)
            np.right_shift(lines, _TABLE_SHIFT, out=lines)
            if full:
                # mode="clip" spares the copy that numpy makes with out= and bounds errors; no index
                # is out of bounds
                table.take(lines.view(np.int64), out=out[low : low + len(part)], mode="clip")
            else:
                out[low : low + len(part), columns] = table[lines.view(np.int64)]
        return out.view(self.dtype).reshape(len(hashes), width, self.top_k)

    def _drawn(self, version: Version, ids: Sequence[int], start: int, what: int) -> Hashes:
        """``(len(ids) - start,)``: what ``version`` draws at each position; ``what`` is 0 tokens, 1
        logprobs, 2 routes.
        """
        if not 0 <= start <= len(ids):
            raise UsageError(f"Position {start} does not lie in a sequence of {len(ids)} tokens.")
        return finish(prefix_hashes(ids)[start:] + np.uint64(self._keys_of(version)[what]))

    def _seeds(self, stretch: Stretch, what: int) -> Hashes:
        """``(stop - start,)``: what ``finish`` makes those of ``_drawn`` of, each position under
        the version whose span holds it.
        """
        spans, ids, start, stop = stretch
        if not 0 <= start <= stop <= len(ids):
            raise UsageError(
                f"Positions {start} to {stop} do not lie in a sequence of {len(ids)} tokens."
            )
        # an engine asks for all tokens and then for all rows, one fewer: the hashes of the longer
        # are those of the shorter
        prefix = prefix_hashes(ids if len(ids) <= stop + 1 else ids[:stop])[start:stop]
        spans = list(spans)
        if len(spans) == 1 and spans[0][0] <= start and stop <= spans[0][1]:
            return prefix + np.uint64(self._keys_of(spans[0][2])[what])
        keys = np.zeros(stop - start, dtype=np.uint64)
        covered = 0
        for low, high, version in spans:
            low, high = max(low, start), min(high, stop)
            if low < high:
                keys[low - start : high - start] = self._keys_of(version)[what]
                covered += high - low
        if covered < stop - start:
            raise UsageError(
                f"The spans cover {covered} of the positions {start} to {stop}: every position"
                " needs a version."
            )
        return prefix + keys

    def _seeds_many(
        self, stretches: Sequence[Stretch], what: int, hashes: Sequence[Hashes] | None
    ) -> Hashes:
        """``_seeds`` of all stretches, one after the other."""
        if not _alike(stretches):
            return np.concatenate(
                [np.zeros(0, np.uint64), *[self._seeds(one, what) for one in stretches]]
            )
        if hashes is None:
            hashes = hashes_of_many([ids for _, ids, _, _ in stretches])
        joined = np.concatenate(
            [
                known[start:stop]
                for known, (_, _, start, stop) in zip(hashes, stretches, strict=True)
            ]
        )
        joined += np.uint64(self._keys_of(next(iter(stretches[0][0]))[2])[what])
        return joined

    def _keys_of(self, version: Version) -> tuple[int, int, int]:
        """Keys of a version for tokens, logprobs and routes."""
        found = self._keys.get(version)
        if found is None:
            if version is None or isinstance(version, bool) or not isinstance(version, int | str):
                raise UsageError(
                    "The coded policy has values for a version that is an int or a str, not for"
                    f" {version!r}."
                )
            digest = hashlib.blake2b(
                f"{self.seed}/{type(version).__name__}/{version}".encode(), digest_size=24
            ).digest()
            tokens, logprobs, routes = (
                int.from_bytes(digest[i : i + 8], "little") for i in (0, 8, 16)
            )
            found = self._keys[version] = (tokens, logprobs, routes)
        return found


def mixed_key(version: Version, kv_versions: Iterable[Version]) -> Version:
    """The version-like key of a forward under weights ``version`` over KV that ``kv_versions``
    computed.

    Equals ``version`` where they are all the same; else a str whose values no pure version
    explains. Runs of equal versions count once, so that the versions of spans may be given in place
    of one per position.
    """
    runs: list[Version] = []
    for one in kv_versions:
        if not runs or runs[-1] != one:
            runs.append(one)
    return (
        version
        if all(one == version for one in runs)
        else f"{version!r} over KV of {', '.join(repr(one) for one in runs)}"
    )


@lru_cache(maxsize=64, typed=True)
def _made(**sizes: Any) -> CodedPolicy:
    """Thousands of cases share a model and a seed, and with them the keys of its versions."""
    return CodedPolicy(**sizes)


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    return tuple(item.name for item in fields(CodedPolicy) if item.init)


def _within(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _alike(stretches: Sequence[Stretch]) -> bool:
    """Whether there are any, and all positions are under one version, as nearly always."""
    found: list[Version] = []
    for spans, ids, start, stop in stretches:
        if not isinstance(spans, list) or len(spans) != 1 or not 0 <= start <= stop <= len(ids):
            return False
        low, high, version = spans[0]
        if low > start or stop > high or (found and found[0] != version):
            return False
        found = found or [version]
    return bool(found)


def _parted(values: npt.NDArray[Any], stretches: Sequence[Stretch]) -> list[npt.NDArray[Any]]:
    """The values of each stretch, in arrays of their own."""
    ends = accumulate(stop - start for _, _, start, stop in stretches)
    return [values[low:high].copy() for low, high in pairwise((0, *ends))]


def _logprobs_of(drawn: Hashes) -> LogprobArray:
    return ((drawn >> _LOGPROB_SHIFT).astype(np.float64) + 1.0) * -_LOGPROB_UNIT


@lru_cache(maxsize=256)
def _columns(
    num_layers: int, moe_layers: tuple[int, ...], chosen: tuple[int, ...] | None
) -> tuple[int, list[int], Hashes]:
    """Number of columns, those of MoE layers, and ``(moe columns,)`` odd random factors, one per
    global layer.
    """
    layers = range(num_layers) if chosen is None else chosen
    moe = frozenset(moe_layers)
    columns = [column for column, layer in enumerate(layers) if layer in moe]
    seeds = np.array([layers[column] + 1 for column in columns], dtype=np.uint64) * N_STEP
    return len(layers), columns, finish(seeds) | np.uint64(1)
