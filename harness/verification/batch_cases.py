"""Batch cases: samples that a batch conversion must carry, and malformed ones that it must refuse.

No two values of a case are equal: token ids, logprobs and route rows are unique, so that a value in
the wrong place is always noticed. Only the padding token occurs again, in the case that is about
it. Numbers of further columns occur again after 502 tokens at the earliest, integers after 100.
One seed gives one set of cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from rollproof.core.batch_columns import Column, ColumnExtent
from rollproof.core.contract import Contract, Filler, Logprobs, MissingLogprobs, Rows
from rollproof.core.records import ColumnArray, FinishReason, IntArray, Rollout
from rollproof.core.sampling_masks import SamplingMask

__all__ = ["BatchCase", "batch_cases"]

_Defect: TypeAlias = tuple[str, Callable[[Contract], bool], Callable[[Rollout], Rollout]]

_LENGTHS = ((3, 4), (1, 6), (5, 1), (4, 4))
_LONG = (12, 44)
"""A sample that is longer than a small fixed width. Adapters of packers hold lines of 64 tokens."""
_WIDE = (6, 9)
"""A sample of at most 16 tokens that leaves room in its batch on both sides of a malformed one."""
_APART = 32
"""Samples begin at multiples of this many token ids."""
_CYCLE = 251
"""Floats of one sign that the cases have for a further column: all that eight bits tell apart."""
_STEP = 83
"""Numbers by which a further column is ahead of the one before: more than a batch has tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCase:
    """Samples that are converted together.

    defect: what is wrong with a sample, in words; ``""``: nothing.
    defective: the request id of that sample.
    """

    name: str
    samples: tuple[Rollout, ...]
    defect: str = ""
    defective: str = ""


def batch_cases(contract: Contract, seed: int = 0) -> tuple[BatchCase, ...]:
    """Return the cases that fit a contract: well-formed batches, then one per ruled-out defect."""
    return (*_well_formed(contract, seed), *_malformed(contract, seed))


class _Maker:
    """Makes samples of one contract; ids, logprobs and routes go on from sample to sample."""

    def __init__(self, contract: Contract, seed: int) -> None:
        self._contract = contract
        self._random = np.random.default_rng(seed)
        self._made = 0
        self._first = 10
        # columns that are exchanged are noticed, too
        self._drawn = {column.name: _STEP * i for i, column in enumerate(contract.columns)}

    def sample(self, prompt: int, response: int, *, largest: bool = False) -> Rollout:
        """Make a sample with this many prompt and response tokens.

        ``largest`` draws experts from the upper end of their range.
        """
        contract = self._contract
        ids = tuple(range(self._first, self._first + prompt + response))
        self._first += _APART * (1 + (prompt + response) // _APART)
        name = f"r{self._made}"
        self._made += 1
        logprobs = -np.arange(1, response + 1, dtype=np.float64) * 0.0371 - 0.0113 * self._made
        return Rollout(
            request_id=name,
            prompt_ids=ids[:prompt],
            response_ids=ids[prompt:],
            finish_reason=FinishReason.LENGTH if response else FinishReason.ABORT,
            logprobs=(
                None
                if contract.logprobs is Logprobs.NONE
                else logprobs.astype(np.float32).astype(np.float64)
            ),
            loss_mask=np.ones(response, dtype=np.int64) if contract.loss_mask else None,
            routes=(
                self._routes(prompt + response, largest)
                if contract.has_routes and response
                else None
            ),
            version=1,
            min_version=1,
            max_version=1,
            columns={
                column.name: self._numbers(
                    column, prompt + response if column.extent is ColumnExtent.TOKENS else response
                )
                for column in contract.columns
                if column.extent.per_token
            },
            values={
                column.name: (
                    f"g{(self._made - 1) // 2}"
                    if column.extent is ColumnExtent.GROUP
                    else self._numbers(column, 1)[0].item()
                )
                for column in contract.columns
                if not column.extent.per_token
            },
            sampling_mask=_masks_of(ids[prompt:]) if contract.sampling_masks else None,
        )

    def _numbers(self, column: Column, length: int) -> ColumnArray:
        """Return the next ``length`` numbers of a column, none of them its filler.

        Floats are multiples of 1/256 that bfloat16 holds exactly; integers fit every type.
        """
        numbers: list[float] = []
        while len(numbers) < length:
            drawn = self._drawn[column.name]
            self._drawn[column.name] += 1
            sign = 1 if drawn // _CYCLE % 2 else -1
            number = sign * (drawn % _CYCLE + 1) / 256 if column.is_float else drawn % 100 + 2
            if column.filler is None or not column.equal(number, column.filler):
                numbers.append(number)
        return np.array(numbers, dtype=np.float32 if column.is_float else np.int64)

    def batch(self, *lengths: tuple[int, int]) -> list[Rollout]:
        """Make samples of these prompt and response lengths."""
        return [self.sample(*pair) for pair in lengths]

    def _routes(self, total: int, largest: bool) -> IntArray:
        contract = self._contract
        experts, top_k = contract.num_experts or 1, contract.top_k or 1
        pool = (
            np.arange(max(0, experts - max(2 * top_k, 8)), experts)
            if largest
            else np.arange(experts)
        )
        rows = np.zeros(
            (total - 1, contract.route_layers, top_k), dtype=np.min_scalar_type(experts - 1)
        )
        shape = (total - 1, len(contract.moe_columns), len(pool))
        rows[:, list(contract.moe_columns)] = pool[
            self._random.random(shape).argsort(axis=2)[:, :, :top_k]
        ]
        if contract.rows is not Rows.ALL:
            return rows
        constant = np.array(-1 if contract.final_row is Filler.MINUS_ONE else 0)
        final = np.arange(top_k) if contract.final_row is Filler.ARANGE else constant
        final = rows[-1:] if contract.final_row is Filler.PREVIOUS else final
        # unsigned rows cannot hold a filler of -1
        wide = rows.astype(np.int32) if contract.final_row is Filler.MINUS_ONE else rows
        return np.concatenate(
            [wide, np.broadcast_to(final, (1, *rows.shape[1:])).astype(wide.dtype)]
        )


def _masks_of(ids: tuple[int, ...]) -> SamplingMask:
    """Return a mask of one to four ids for each token, which no other token has; every seventh
    token was drawn among all.
    """
    return SamplingMask.from_lists(
        [token + 10_000 * i for i in range(0 if token % 7 == 6 else 1 + token % 4)] for token in ids
    )


def _well_formed(contract: Contract, seed: int) -> Iterator[BatchCase]:
    make = _Maker(contract, seed)
    yield BatchCase(name="one sample", samples=(make.sample(3, 4),))
    yield BatchCase(name="several lengths", samples=tuple(make.batch(*_LENGTHS)))
    yield BatchCase(name="equal lengths", samples=tuple(make.batch((3, 4), (3, 4), (3, 4))))
    if contract.has_routes:
        yield BatchCase(
            name="largest expert ids",
            samples=(make.sample(3, 4, largest=True), make.sample(2, 5, largest=True)),
        )
        yield BatchCase(
            name="read-only arrays",
            samples=tuple(_read_only(sample) for sample in make.batch(*_LENGTHS)),
        )
        for place, name in enumerate(("first", "in the middle", "last")):
            samples = make.batch((3, 4), (2, 3), (4, 2))
            samples[place] = replace(samples[place], routes=None)
            yield BatchCase(name=f"a sample without routes {name}", samples=tuple(samples))
    if any(column.extent is ColumnExtent.GROUP for column in contract.columns):
        # a rollout that failed leaves its group with fewer samples than the others
        yield BatchCase(
            name="a group that lost a sample",
            samples=tuple(_in_groups(contract, make.batch((3, 4), (2, 3), (4, 2), (1, 5), (2, 6)))),
        )
    if contract.rows is Rows.CAPTURED_PREFIX:
        yield BatchCase(
            name="a captured prefix",
            samples=tuple(_with_rows(sample, 2) for sample in make.batch((3, 4), (4, 3))),
        )
    if contract.loss_mask:
        turns = [
            replace(sample, loss_mask=np.array([1, 1, 0, 0, 1, 1]))
            for sample in make.batch((3, 6), (2, 6))
        ]
        yield BatchCase(name="tokens of the environment", samples=tuple(turns))
    if contract.abort_surfaces:
        yield BatchCase(
            name="a sample without response tokens",
            samples=tuple(make.batch((3, 4), (3, 0), (2, 5))),
        )
        if contract.has_routes:
            # Without routing replay nothing but the lengths tells it from the others.
            bare = (replace(each, routes=None) for each in make.batch((3, 4), (3, 0), (2, 5)))
            yield BatchCase(
                name="a sample without response tokens, and none with routes", samples=tuple(bare)
            )
    if (
        contract.logprobs is not Logprobs.NONE
        and contract.missing_logprobs is not MissingLogprobs.NEVER
    ):
        yield BatchCase(
            name="a missing logprob",
            samples=tuple(
                _without_logprob(sample, contract) for sample in make.batch((3, 4), (2, 5))
            ),
        )
    yield BatchCase(
        name="a long sample among short ones", samples=tuple(make.batch((3, 4), _LONG, (2, 5)))
    )
    # Llama and GPT-2 have no padding token of their own: stacks pad with the end of sequence.
    short, long, plain = make.batch((3, 4), (4, 6), (2, 3))
    pad = contract.pad_id or 0
    yield BatchCase(
        name="the padding token as the end of sequence",
        samples=(_with_token(short, pad, 6), _with_token(long, pad, 1, 6, 9), plain),
    )
    if contract.logprobs is not Logprobs.NONE:
        # Clipping at -20 or -32 is only seen in a token that was very unlikely.
        rare, plain = make.batch((3, 4), (2, 5))
        assert rare.logprobs is not None
        values = rare.logprobs.copy()
        values[:2] = (-64.5, 0.0)
        yield BatchCase(
            name="a very small logprob, and one of 0",
            samples=(replace(rare, logprobs=values), plain),
        )
    if contract.loss_mask:
        # an overlong answer is masked, and still counts for the baseline of its group
        samples = make.batch((3, 4), (2, 5), (4, 2))
        samples[1] = replace(samples[1], loss_mask=np.zeros(5, dtype=np.int64))
        yield BatchCase(name="a sample without trained tokens", samples=tuple(samples))


def _malformed(contract: Contract, seed: int) -> Iterator[BatchCase]:
    """A batch of three with the defective sample in the middle, and one with it alone."""
    for defect, ruled_out, spoil in (*_DEFECTS, *_column_defects(contract)):
        if not ruled_out(contract):
            continue
        for alone in (True, False):
            # without the room, numpy refuses rows that the conversion itself does not count
            samples = _Maker(contract, seed + 1).batch((3, 5), (2, 5), _WIDE)
            samples[1] = spoil(samples[1])
            chosen = samples[1:2] if alone else samples
            name = f"{defect}{'' if alone else ', among others'}"
            yield BatchCase(
                name=name, samples=tuple(chosen), defect=defect, defective=samples[1].request_id
            )


def _in_groups(contract: Contract, samples: list[Rollout]) -> Iterator[Rollout]:
    """Yield five samples as groups of two, one and two."""
    labels = [column.name for column in contract.columns if column.extent is ColumnExtent.GROUP]
    for sample, group in zip(samples, ("a", "a", "b", "c", "c"), strict=True):
        yield replace(sample, values={**sample.values, **dict.fromkeys(labels, group)})


def _with_rows(sample: Rollout, rows: int) -> Rollout:
    """Return the sample with ``rows`` route rows: cut, or with its last row repeated."""
    assert sample.routes is not None
    cut = sample.routes[:rows]
    return replace(sample, routes=np.concatenate([cut, cut[-1:].repeat(rows - len(cut), axis=0)]))


def _with_token(sample: Rollout, token: int, *places: int) -> Rollout:
    """Return the sample with ``token`` at ``places``, its last one included."""
    ids = list(sample.prompt_ids + sample.response_ids)
    for place in places:
        ids[place] = token
    prompt = len(sample.prompt_ids)
    return replace(
        sample,
        prompt_ids=tuple(ids[:prompt]),
        response_ids=tuple(ids[prompt:]),
        finish_reason=FinishReason.STOP,
    )


def _read_only(sample: Rollout) -> Rollout:
    mask = sample.sampling_mask
    masks = () if mask is None else (mask.counts, mask.token_ids)
    for array in (
        *(sample.routes, sample.logprobs, sample.loss_mask),
        *masks,
        *sample.columns.values(),
    ):
        if array is not None:
            array.flags.writeable = False
    return sample


def _without_logprob(sample: Rollout, contract: Contract) -> Rollout:
    assert sample.logprobs is not None
    logprobs, mask = sample.logprobs.copy(), np.ones(len(sample.response_ids), dtype=np.int64)
    logprobs[1] = np.nan
    mask[1] = 0 if contract.missing_logprobs is MissingLogprobs.MASKED else 1
    return replace(sample, logprobs=logprobs, loss_mask=mask if contract.loss_mask else None)


def _of_length(field: str, length: int) -> Callable[[Rollout], Rollout]:
    """Return a function that cuts or extends a per-token array of the response to ``length``."""

    def spoil(sample: Rollout) -> Rollout:
        array = getattr(sample, field)
        longer = np.concatenate([array, array[-1:].repeat(max(0, length - len(array)))])[:length]
        return (
            replace(sample, logprobs=longer)
            if field == "logprobs"
            else replace(sample, loss_mask=longer)
        )

    return spoil


def _with_masks(sample: Rollout, length: int) -> Rollout:
    """Return the sample with the sampling masks of ``length`` tokens: cut, or repeated."""
    mask = sample.sampling_mask
    assert mask is not None
    return replace(sample, sampling_mask=SamplingMask.joined([mask, mask]).cut(0, length))


def _column_defects(contract: Contract) -> Iterator[_Defect]:
    """Yield the defects of further columns of a sample of 2 + 5 tokens."""
    for column in contract.columns:
        if not column.extent.per_token:
            continue
        tokens = 7 if column.extent is ColumnExtent.TOKENS else 5
        for length in (3, tokens + 3):
            yield (
                f"{length} {column.name} for {tokens} tokens",
                lambda _: True,
                partial(_with_column, name=column.name, length=length),
            )


def _with_column(sample: Rollout, name: str, length: int) -> Rollout:
    """Return the sample with ``length`` values of a column: cut, or the last one repeated."""
    values = sample.columns[name]
    longer = np.concatenate([values, values[-1:].repeat(max(0, length - len(values)))])[:length]
    return replace(sample, columns={**sample.columns, name: longer})


def _has_rows(contract: Contract) -> bool:
    return contract.has_routes and contract.rows is not Rows.CAPTURED_PREFIX


def _has_logprobs(contract: Contract) -> bool:
    return contract.logprobs is not Logprobs.NONE


def _has_masks(contract: Contract) -> bool:
    return contract.sampling_masks


_DEFECTS: tuple[_Defect, ...] = (
    ("sampling masks of 3 for 5 response tokens", _has_masks, partial(_with_masks, length=3)),
    ("sampling masks of 8 for 5 response tokens", _has_masks, partial(_with_masks, length=8)),
    ("2 route rows for 7 tokens", _has_rows, lambda sample: _with_rows(sample, 2)),
    (
        "9 route rows for 7 tokens",
        lambda contract: contract.has_routes,
        lambda sample: _with_rows(sample, 9),
    ),
    ("2 logprobs for 5 response tokens", _has_logprobs, _of_length("logprobs", 2)),
    ("8 logprobs for 5 response tokens", _has_logprobs, _of_length("logprobs", 8)),
    (
        "a loss mask of 3 for 5 response tokens",
        lambda contract: contract.loss_mask,
        _of_length("loss_mask", 3),
    ),
    (
        "a loss mask of 8 for 5 response tokens",
        lambda contract: contract.loss_mask,
        _of_length("loss_mask", 8),
    ),
)
"""Each defect of a sample of 2 + 5 tokens: in words, who rules it out, how to make it."""
