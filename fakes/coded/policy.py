"""Coded policy: next token, logprob and experts as pure functions of weight version, token ids so
far and layer.

So every cell of a coded trace has an expected value, and its value alone says which request,
position, layer and version produced it. A fault that keeps every shape right (a row recomputed
under new weights, rows swapped between two requests, an off-by-one) is seen and named.

How values are coded. The ids up to position i have the 64-bit prefix hash
``H_i = sum_j mix(ids[j], j)`` (a sum, so that ``np.cumsum`` computes a complete sequence). There,
version v draws its values from ``h = finish(H + key(v, kind))``. The experts of layer l are line
``(h * m_l) >> 50`` of a table of 2**14 ordered draws of k distinct experts, with ``m_l`` odd and
random. Nothing else is looked up, so two rows share cells only by chance.

How often two values coincide although they should differ:

==================  ==============================================================================
prefix hash         2**-64 per pair of different prefixes
cell of one layer   about 1/p + 2**-14 with p = E!/(E-k)! ordered draws
                    (E = 128, k = 8: 6e-5; E = 8, k = 2: 0.018)
row                 that to the power of the number of MoE layers
                    (E = 8, k = 2, three layers: 6e-6)
logprob             2**-23; values lie on a grid that float32 represents exactly. Wide ones:
                    about 2**-22, but for the one in eight that is exactly 0.0
token               about 1/(vocab - 1)
==================  ==============================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.error_text import show
from rollproof.core.records import IntArray, LogprobArray, Scalar, Version
from rollproof.core.sampling_masks import SamplingMask
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
    prefix_hashes,
)
from rollproof.fakes.coded.supports import coded_supports

if TYPE_CHECKING:
    from rollproof.core.case import Model

__all__ = ["CodedPolicy", "PrefixState", "VersionSpan", "mixed_key"]

PrefixState: TypeAlias = "tuple[int, int]"
"""Opaque state of a sequence: its prefix hash and its length."""
VersionSpan: TypeAlias = "tuple[int, int, Version]"
"""Positions ``start`` (inclusive) to ``stop`` (exclusive) belong to a version."""

_TOKENS, _LOGPROBS, _ROUTES = range(3)
"""Kinds of drawn values: each version has one key for each."""
_N32, _N_LOW, _N40, _N16, _N63 = (np.uint64(number) for number in (32, 0xFFFFFFFF, 40, 0xFFFF, 63))
_TABLE_BITS = 14
_TABLE_SHIFT = np.uint64(64 - _TABLE_BITS)
# the scratch of a block and the table together stay in the second-level cache
_BLOCK_CELLS = 1 << 14
_LOGPROB_SHIFT, _LOGPROB_UNIT = np.uint64(64 - 23), 2.0**-20
# Wide values are on a coarser grid, which float32 still represents exactly down to -40.
_WIDE_VALUES, _WIDE_UNIT, _ZERO_BITS = 40 << 17, 2.0**-17, np.uint64(7)
_OPTIONAL = ("eos_every", "eos_id", "common_tokens", "wide_logprobs")
_MOST_COMMON = 256
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
    """A policy that codes every value; the sampler of the fake engines, and an ``Oracle``.

    An engine calls ``start_state``, ``next_token``, ``extend``, ``logprobs_spans`` and
    ``routes_spans``; a subclass may override any of them. A version is an int, a str, or a
    ``mixed_key``. Equal fields make equal policies. Raises ``CaseError`` for sizes out of bounds.

    vocab: token ids are 0 to ``vocab - 1``.
    moe_layers: global indexes of MoE layers; columns of the other, dense layers are zeros.
    eos_every: on average one token in this many is ``eos_id``; ``None`` for never.
    common_tokens: every second token, on average, is one of these; they are not ``eos_id``.
    wide_logprobs: logprobs lie in [-40, 0], one in eight is exactly 0.0, and about one in nine is
        below -32; else they lie in [-8, 0).
    """

    seed: int
    vocab: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    eos_every: int | None = None
    eos_id: int = 0
    common_tokens: tuple[int, ...] = ()
    wide_logprobs: bool = False
    _keys: dict[Version, tuple[int, int, int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

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
            # a case that is read from a file may hold anything
            wide: object = self.wide_logprobs
            if not isinstance(wide, bool):
                problems.append(f"wide_logprobs={wide!r} must be a bool.")
            if self.eos_id >= self.vocab:
                problems.append(f"eos_id={self.eos_id} must be below vocab={self.vocab}.")
            common: object = self.common_tokens
            if (
                not isinstance(common, tuple)
                or len(common) > _MOST_COMMON
                or any(
                    not _within(token, 0, self.vocab - 1) or token == self.eos_id
                    for token in common
                )
            ):
                problems.append(
                    f"common_tokens={show(common)} must be a tuple of at most {_MOST_COMMON} tokens"
                    f" below vocab={self.vocab}, without eos_id={self.eos_id}."
                )
        if problems:
            raise CaseError("The coded policy cannot be made:\n  - " + "\n  - ".join(problems))

    @staticmethod
    def from_model(model: Model, seed: int) -> CodedPolicy:
        """The policy that stands for a case's model."""
        return _cached_policy(
            seed=seed,
            vocab=model.vocab,
            num_layers=model.num_layers,
            moe_layers=tuple(model.moe_layers),
            num_experts=model.num_experts,
            top_k=model.top_k,
            eos_every=model.eos_every,
            eos_id=model.eos_id,
            common_tokens=tuple(model.common_tokens),
            wide_logprobs=model.wide_logprobs,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; ``from_dict`` is its inverse."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in _names()
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Read the form of ``to_dict``, which may come from a file.

        Raises ``CaseError`` for unknown or missing keys and for numbers out of bounds.
        """
        if not isinstance(mapping, Mapping):
            raise CaseError(f"A coding must be a mapping, not {type(mapping).__name__}.")
        unknown = sorted(str(key) for key in set(mapping) - set(_names()))
        missing = [name for name in _names() if name not in mapping and name not in _OPTIONAL]
        if unknown or missing:
            raise CaseError(
                f"This coding has unknown keys {unknown[:8]} and lacks {missing}; its keys are"
                f" {list(_names())}."
            )
        values = dict(mapping)
        layers = values["moe_layers"]
        if not isinstance(layers, list | tuple) or len(layers) > _LIMITS["num_layers"][1]:
            raise CaseError(
                f"moe_layers must be a list of at most {_LIMITS['num_layers'][1]} layers."
            )
        common = values.get("common_tokens", ())
        if isinstance(common, list):
            values["common_tokens"] = tuple(common)
        return cls(**{**values, "moe_layers": tuple(layers)})

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer type that holds every expert id."""
        return np.dtype(np.min_scalar_type(self.num_experts - 1))

    def start_state(self, ids: Sequence[int]) -> PrefixState:
        """Return the state of a sequence after ``ids``."""
        return (int(prefix_hashes(ids)[-1]) if len(ids) else 0, len(ids))

    def extend(self, state: PrefixState, token: int) -> PrefixState:
        """Return the state after one more token: ``start_state`` of the longer sequence."""
        total, position = state
        z = (token + (position + 1) * STEP) & MASK
        z = (z ^ z >> 31) * MIX & MASK
        return ((total + (z ^ z >> 33)) & MASK, position + 1)

    def next_token(self, version: Version, state: PrefixState) -> int:
        """Return the token that ``version`` samples after the sequence, in half a microsecond."""
        keys = self._keys.get(version) or self._keys_of(version)
        z = (state[0] + keys[0]) & MASK
        z = (z ^ z >> 32) * F1 & MASK
        z = (z ^ z >> 29) * F2 & MASK
        z ^= z >> 32
        if self.eos_every is not None and (z >> 32) % self.eos_every == 0:
            return self.eos_id
        common = self.common_tokens
        if common and z >> 63:
            return common[(z >> 40 & 0xFFFF) % len(common)]
        token = (z & 0xFFFFFFFF) % (self.vocab - 1)
        return token + (token >= self.eos_id)

    def draw(self, version: Version, state: PrefixState, number: int) -> int:
        """Return the token of draw ``number`` after the sequence; draw 0 is ``next_token``."""
        # a policy draws by the tokens so far: one more stands for the number
        return self.next_token(
            version, self.extend(state, number % self.vocab) if number else state
        )

    def drawn(self, version: Version, ids: Sequence[int], draw: int) -> int:
        """Return the token of draw number ``draw`` after ``ids``."""
        return self.draw(version, self.start_state(ids), draw)

    def choices(
        self, version: Version, ids: Sequence[int], start: int = 0
    ) -> npt.NDArray[np.int64]:
        """Return ``next_token`` after each ``ids[:i]``, ``i >= start``: ``(len(ids) - start,)``."""
        before = np.concatenate([np.zeros(1, dtype=np.uint64), prefix_hashes(ids)])[
            start : len(ids)
        ]
        z = finish(before + np.uint64(self._keys_of(version)[_TOKENS]))
        token = ((z & _N_LOW) % np.uint64(self.vocab - 1)).astype(np.int64)
        token += token >= self.eos_id
        if self.common_tokens:
            common = np.array(self.common_tokens, dtype=np.int64)
            drawn = (z >> _N40 & _N16) % np.uint64(len(common))
            token = np.where(z >> _N63, common[drawn.astype(np.int64)], token)
        if self.eos_every is not None:
            token[(z >> _N32) % np.uint64(self.eos_every) == 0] = self.eos_id
        return token

    def logprobs(self, version: Version, ids: Sequence[int], start: int) -> LogprobArray:
        """Return log p(``ids[i]`` | ``ids[:i]``) for ``i >= start``: ``(len(ids) - start,)``.

        Values lie in [-8, 0), or [-40, 0] if they are wide, and belong to temperature 1.
        """
        return self._logprobs_of(self._drawn(version, ids, start, _LOGPROBS))

    def routes(self, version: Version, ids: Sequence[int], start: int = 0) -> IntArray:
        """Return the experts of the forward of each token from ``start`` on.

        The shape is ``(len(ids) - start, num_layers, top_k)``. Row i depends on ``ids[:i + 1]``.
        The k experts of a cell are distinct; dense layers contain zeros.
        """
        return self._routes_of(self._drawn(version, ids, start, _ROUTES))

    def logprobs_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> LogprobArray:
        """Return ``logprobs`` of positions ``start`` to ``stop``, each under its span's version."""
        return self._logprobs_of(finish(self._seeds(spans, ids, start, stop, _LOGPROBS)))

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        """Return ``routes`` of positions ``start`` to ``stop``, each under its span's version.

        Raises ``UsageError`` if a position has no span: a row without a version was never computed.
        """
        return self._routes_of(finish(self._seeds(spans, ids, start, stop, _ROUTES)))

    def sampling_mask(
        self,
        spans: Iterable[VersionSpan],
        ids: Sequence[int],
        start: int,
        stop: int,
        sampling: Mapping[str, Scalar],
    ) -> SamplingMask | None:
        """Return the support of each token from position ``start`` (at least 1) to ``stop``, under
        its span's version; ``None`` if ``sampling`` leaves no token out.
        """
        # a support depends on the tokens before, so that all draws of one position share it
        before = [(low - 1, high - 1, version) for low, high, version in spans]
        drawn = finish(self._seeds(before, ids, start - 1, stop - 1, _LOGPROBS))
        tokens = np.array(ids[start:stop], dtype=np.int64)
        return coded_supports(drawn, tokens, self.vocab, sampling)

    def _logprobs_of(self, drawn: Hashes) -> LogprobArray:
        grid = (drawn >> _LOGPROB_SHIFT).astype(np.float64)
        if not self.wide_logprobs:
            return (grid + 1.0) * -_LOGPROB_UNIT
        # other bits of the hash decide which values are exactly 0.0
        wide = (grid % _WIDE_VALUES + 1.0) * -_WIDE_UNIT
        return np.where(drawn & _ZERO_BITS == 0, 0.0, wide)

    def _routes_of(self, hashes: Hashes) -> IntArray:
        """Expand row hashes into ``(len(hashes), num_layers, top_k)``."""
        factors = _layer_factors(self.moe_layers)
        full = len(factors) == self.num_layers
        table = _expert_table(self.num_experts, self.top_k)
        out = (np.empty if full else np.zeros)((len(hashes), self.num_layers), dtype=table.dtype)
        block = max(1, _BLOCK_CELLS // max(1, len(factors)))
        scratch = np.empty((min(block, len(hashes)), len(factors)), dtype=np.uint64)
        for low in range(0, len(hashes), block):
            part = hashes[low : low + block]
            lines = scratch[: len(part)]
            np.multiply(part[:, None], factors, out=lines)
            np.right_shift(lines, _TABLE_SHIFT, out=lines)
            if full:
                # mode="clip" spares the copy that numpy makes for out= with bounds errors; every
                # index is within bounds
                table.take(lines.view(np.int64), out=out[low : low + len(part)], mode="clip")
            else:
                out[low : low + len(part), self.moe_layers] = table[lines.view(np.int64)]
        return out.view(self.dtype).reshape(len(hashes), self.num_layers, self.top_k)

    def _drawn(self, version: Version, ids: Sequence[int], start: int, kind: int) -> Hashes:
        """Return what ``version`` draws at each position from ``start`` on."""
        if not 0 <= start <= len(ids):
            raise UsageError(f"Position {start} does not lie in a sequence of {len(ids)} tokens.")
        return finish(prefix_hashes(ids)[start:] + np.uint64(self._keys_of(version)[kind]))

    def _seeds(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int, kind: int
    ) -> Hashes:
        """Return ``(stop - start,)`` hashes, not finished, each under its span's version."""
        if not 0 <= start <= stop <= len(ids):
            raise UsageError(
                f"Positions {start} to {stop} do not lie in a sequence of {len(ids)} tokens."
            )
        # An engine needs logprobs of all tokens and routes of one fewer. Hashing the same sequence
        # for both lets the second call find the first one's hashes in the cache.
        prefix = prefix_hashes(ids if len(ids) <= stop + 1 else ids[:stop])[start:stop]
        spans = list(spans)
        if len(spans) == 1 and spans[0][0] <= start and stop <= spans[0][1]:
            return prefix + np.uint64(self._keys_of(spans[0][2])[kind])
        keys = np.zeros(stop - start, dtype=np.uint64)
        covered = 0
        for low, high, version in spans:
            low, high = max(low, start), min(high, stop)
            if low < high:
                keys[low - start : high - start] = self._keys_of(version)[kind]
                covered += high - low
        if covered < stop - start:
            raise UsageError(
                f"The spans cover {covered} of the positions {start} to {stop}: every position"
                " needs a version."
            )
        return prefix + keys

    def _keys_of(self, version: Version) -> tuple[int, int, int]:
        """Return the keys of a version for tokens, logprobs and routes."""
        keys = self._keys.get(version)
        if keys is None:
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
            keys = self._keys[version] = (tokens, logprobs, routes)
        return keys


def mixed_key(version: Version, kv_versions: Iterable[Version]) -> Version:
    """Return the key of a forward under weights ``version`` over KV that ``kv_versions`` computed.

    It equals ``version`` if they are all the same; else it is a str with values that no pure
    version has. Runs of equal versions count once, so the versions may be those of spans or of
    single positions.
    """
    runs: list[Version] = []
    for kv_version in kv_versions:
        if not runs or runs[-1] != kv_version:
            runs.append(kv_version)
    if all(kv_version == version for kv_version in runs):
        return version
    return f"{version!r} over KV of {', '.join(map(repr, runs))}"


# Thousands of cases share a model and a seed, and with them the keys of the versions.
@lru_cache(maxsize=64, typed=True)
def _cached_policy(**sizes: Any) -> CodedPolicy:
    return CodedPolicy(**sizes)


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    return tuple(item.name for item in fields(CodedPolicy) if item.init)


def _within(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


@lru_cache(maxsize=256)
def _layer_factors(moe_layers: tuple[int, ...]) -> Hashes:
    """Return one odd random factor for each MoE layer."""
    seeds = np.array([layer + 1 for layer in moe_layers], dtype=np.uint64) * N_STEP
    return finish(seeds) | np.uint64(1)


@lru_cache(maxsize=64)
def _expert_table(num_experts: int, top_k: int) -> npt.NDArray[Any]:
    """Return ``(2**14,)`` cells, each ``top_k`` distinct experts packed into one element.

    Cells are drawn uniformly among the ordered choices: expert k is drawn among those that are
    left, and its rank among them becomes an id by stepping over the ids already taken, in
    ascending order.
    """
    dtype = np.dtype(np.min_scalar_type(num_experts - 1))
    # Random cases draw a model each: passes over narrow columns build its table in a tenth of the
    # time that sorting int64 rows takes.
    narrow = np.dtype(np.uint16 if num_experts < 1 << 16 else np.uint32)
    size = 1 << _TABLE_BITS
    out = np.empty((size, top_k), dtype=dtype)
    taken: list[npt.NDArray[Any]] = []
    for slot in range(top_k):
        seeds = np.arange(slot * size + 1, (slot + 1) * size + 1, dtype=np.uint64) * N_STEP
        pick = (finish(seeds) % np.uint64(num_experts - slot)).astype(narrow)
        for column in taken:
            pick += pick >= column
        out[:, slot] = pick
        if slot + 1 < top_k:
            _insert_sorted(taken, pick)
    width = top_k * dtype.itemsize
    packed = f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"
    cells = out.view(packed)[:, 0]
    cells.setflags(write=False)
    return cells


def _insert_sorted(taken: list[npt.NDArray[Any]], pick: npt.NDArray[Any]) -> None:
    """Add a column to columns that ascend in every row, so that they still do."""
    for number, column in enumerate(taken):
        taken[number] = np.minimum(column, pick)
        pick = np.maximum(column, pick)
    taken.append(pick)
