"""Batch conversions: run a stack's own on made samples, and judge what reaches the training rows.

This needs no engine and no fleet: ``rollproof.verification.batch_cases`` makes the samples, the
stack's own code converts them, and the checks of the family ``batch`` compare.
"""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.error_text import describe_error, describe_error_with_place
from rollproof.core.events.training import Batch
from rollproof.core.record_validation import validate_row
from rollproof.core.records import BatchRow, ColumnArray, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Header, Recorder, Trace
from rollproof.errors import RollproofError, SubjectError
from rollproof.invariants import default_registry
from rollproof.judging.report import Report
from rollproof.simulation import virtual_loop
from rollproof.simulation.watchdog import STUCK, GivenUp, Watchdog, limit
from rollproof.verification.argument_checks import (
    as_expected,
    as_name,
    as_names,
    as_seed,
    check_factory,
)
from rollproof.verification.batch_cases import BatchCase, batch_cases
from rollproof.verification.canary import Plant, replaced, try_canary
from rollproof.verification.options import Options, factory_name
from rollproof.verification.reports import make_report, situations
from rollproof.verification.traces import judge

__all__ = ["judge_batches", "record_batches"]

_METHODS = ("collate", "rows")
_ARRAYS = ("logprobs", "loss_mask", "routes")


def judge_batches(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    seed: int = 0,
    only: Iterable[str] = (),
    cases: Iterable[BatchCase] | None = None,
    expected: dict[str, str] | None = None,
) -> Report:
    """Convert the batch cases with the ``BatchSubject`` that ``factory`` makes, and report.

    Args:
        factory: makes a fresh adapter for each case.
        name: what the report calls it.
        seed: the seed of the samples.
        only: ids of checks (default: the family ``batch``).
        cases: replaces the samples.
        expected: ids of checks that are known to fail, with the reason.

    Raises ``SubjectError`` for a subject that does not implement the protocol.
    """
    check_factory(factory, "judge_batches()")
    options = Options(
        name=as_name(name),
        seed=as_seed(seed) or 0,
        only=as_names(only, "only"),
        expected=as_expected(expected),
    )
    return run(factory, options, cases)


def run(
    factory: SubjectFactory, options: Options, cases: Iterable[BatchCase] | None = None
) -> Report:
    """Judge a ``BatchSubject`` on ``cases`` (default: ``batch_cases``)."""
    started = time.perf_counter()
    registry = default_registry().select(options.only or ("batch",))
    trace = record_batches(factory, name=options.name, seed=options.seed, cases=cases)
    return make_report(
        judge(trace, registry).results,
        subject=trace.header.subject,
        profile="batches",
        seed=options.seed,
        started=started,
        cases=len(trace.events),
        expected=options.expected,
        exercised=situations(trace.events, "batches", trace.header),
        canary=(
            try_canary([trace], registry, (_SHIFTED_ROW,))
            if _SHIFTED_ROW.check_id in registry.ids
            else None
        ),
    )


def record_batches(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    seed: int = 0,
    cases: Iterable[BatchCase] | None = None,
) -> Trace:
    """Record one ``Batch`` event per case: the samples, and the rows that a fresh subject made."""
    label = name or factory_name(factory)
    contract = _make(factory, label).contract
    recorder = Recorder(lambda: 0.0)
    for case in batch_cases(contract, seed) if cases is None else cases:
        event = recorder.record(_convert(_make(factory, label), case, label))
        if (event.refused or "").startswith(STUCK):
            break  # the other cases would get stuck too, for minutes each
    return recorder.trace(
        Header(subject=label, contract=contract, seed=seed, profile="batches", about="batches")
    )


def _make(factory: SubjectFactory, label: str) -> Any:
    try:
        subject = factory()
    except RollproofError:
        raise
    except Exception as error:
        raise SubjectError(
            f"{label} could not be created: {describe_error_with_place(error)}."
        ) from error
    missing = [method for method in _METHODS if not callable(getattr(subject, method, None))]
    if missing or not isinstance(getattr(subject, "contract", None), Contract):
        raise SubjectError(
            f"{label} made a {type(subject).__name__} without {missing or 'a contract'}: a"
            f" BatchSubject has a `contract` (a Contract) and {list(_METHODS)}."
        )
    return subject


def _convert(subject: Any, case: BatchCase, label: str) -> Batch:
    """Convert one case. What the conversion raises is a refusal, which the checks judge."""
    handed_in = [_copy(sample) for sample in case.samples]
    event = Batch(
        name=case.name, samples=case.samples, defect=case.defect, defective=case.defective
    )
    try:
        batch = _watched(lambda: subject.collate(handed_in))
    except RollproofError:
        raise
    except GivenUp as error:
        return replace(event, refused=str(error))
    except Exception as error:  # noqa: BLE001 - a refusal is an outcome
        return replace(
            event, refused=describe_error(error), changed=_changed(case.samples, handed_in)
        )
    try:
        rows = _watched(lambda: subject.rows(batch))
    except RollproofError:
        raise
    except GivenUp as error:
        raise SubjectError(
            f"{label}.rows never ended on the batch of {case.name!r}: {error}."
        ) from None
    except Exception as error:
        raise SubjectError(
            f"{label}.rows raised {describe_error_with_place(error)} on the batch of {case.name!r}."
        ) from error
    if not isinstance(rows, list | tuple) or not all(isinstance(row, BatchRow) for row in rows):
        raise SubjectError(
            f"{label}.rows must return a list of BatchRow, not {type(rows).__name__}."
        )
    return replace(
        event,
        rows=tuple(validate_row(row, f"{label}.rows", subject.contract.columns) for row in rows),
        changed=_changed(case.samples, handed_in),
    )


def _watched(work: Callable[[], Any]) -> Any:
    """What a sync or async method returned. Raises ``GivenUp``, which says why, where it never
    ended, also where it handled its end.
    """
    watchdog = Watchdog(lambda: 0, limit())
    made = None
    with watchdog:
        try:
            made = watchdog.run(lambda: _settled(work()))
        except (Exception, GivenUp, CancelledError):
            if watchdog.message is None:
                raise
    if watchdog.message is not None:
        raise GivenUp(watchdog.message)
    return made


def _settled(value: Any) -> Any:
    """Return the result of a sync or async method; an async one runs on the virtual clock."""
    if not isinstance(value, Awaitable):
        return value

    async def wait() -> Any:
        return await value

    return virtual_loop.run(wait)


def _copy(sample: Rollout) -> Rollout:
    """Copy a sample, so that what the stack writes does not reach the trace."""
    # Arrays of a real engine may be read-only (numpy views of a reply's bytes); the copies are too.
    return replace(
        sample,
        logprobs=_own(sample.logprobs),
        loss_mask=_own(sample.loss_mask),
        routes=_own(sample.routes),
        columns={name: _own(column) for name, column in sample.columns.items()},
        values=dict(sample.values),
    )


def _own(array: Any) -> Any:
    """Return a copy, writable if the original is."""
    if array is None:
        return None
    copy = array.copy()
    copy.flags.writeable = array.flags.writeable
    return copy


def _changed(samples: tuple[Rollout, ...], handed_in: list[Rollout]) -> tuple[str, ...]:
    """Return the names of the arrays that the conversion changed in place."""
    return tuple(
        f"{name} of {sample.request_id}"
        for sample, now in zip(samples, handed_in, strict=False)
        for name, array in _arrays_of(sample)
        if not _equal(array, dict(_arrays_of(now)).get(name))
    )


def _arrays_of(sample: Rollout) -> Iterator[tuple[str, ColumnArray]]:
    """Yield the arrays of a sample by name, its further columns among them."""
    for name in _ARRAYS:
        array = getattr(sample, name)
        if array is not None:
            yield name, array
    yield from sample.columns.items()
    if sample.sampling_mask is not None:
        yield "sampling_mask.counts", sample.sampling_mask.counts
        yield "sampling_mask.token_ids", sample.sampling_mask.token_ids


def _equal(before: ColumnArray, now: ColumnArray | None) -> bool:
    # only floats have NaN
    return now is not None and np.array_equal(before, now, equal_nan=before.dtype.kind == "f")


def _shift_tokens(trace: Trace) -> Iterator[Trace]:
    """Shift the tokens of the first row of a batch by one place, in each batch in turn."""
    for place, event in enumerate(trace.events):
        if not isinstance(event, Batch) or not event.rows or event.defect:
            continue
        first = event.rows[0]
        if len(set(first.token_ids.tolist())) > 1:
            spoiled = replace(first, token_ids=np.roll(first.token_ids, 1))
            yield replaced(trace, place, replace(event, rows=(spoiled, *event.rows[1:])))


_SHIFTED_ROW = Plant("the tokens of a row shifted by one place", "batch.tokens", _shift_tokens)
