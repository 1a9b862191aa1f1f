"""Layout functions: run a framework's own on coded payloads, and judge where each row went.

Needs no model, no device and no process group: the adapter tells the function which rank it is.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollproof.core.contract import Contract, KvPolicy, Logprobs, ResumeBy, Rows, Versions
from rollproof.core.error_text import describe_error, describe_error_with_place
from rollproof.core.events.layouts import Laid
from rollproof.core.progress import Progress
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Header, Recorder, Trace
from rollproof.errors import RollproofError, SubjectError, UsageError
from rollproof.invariants import default_registry
from rollproof.invariants.layout.call_check import functions_read
from rollproof.judging.report import Canary, Report
from rollproof.layouts.functions import FUNCTIONS, functions_of
from rollproof.layouts.layout_calls import Call
from rollproof.layouts.layout_cases import layout_calls
from rollproof.layouts.returned import Misfit
from rollproof.verification.argument_checks import (
    as_expected,
    as_name,
    as_names,
    as_recipe,
    as_seed,
    check_factory,
)
from rollproof.verification.canary import Plant, replaced, try_canary
from rollproof.verification.options import Options, factory_name
from rollproof.verification.reports import make_report
from rollproof.verification.traces import judge

__all__ = ["judge_layouts", "record_layouts"]

_DRAWS: Mapping[str, int] = {"pr": 40, "nightly": 500, "soak": 10_000}
"""Random calls of each function, by profile."""
_CONTRACT = Contract(
    rows=Rows.NONE,
    resume=ResumeBy.NONE,
    versions=Versions.NONE,
    logprobs=Logprobs.NONE,
    abort_surfaces=False,
    kv_policy=KvPolicy.RECOMPUTE,
)
"""Layout functions promise nothing about rollouts; each call declares its layout."""


def judge_layouts(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int = 0,
    only: Iterable[str] = (),
    calls: Iterable[tuple[str, Call]] | None = None,
    expected: Mapping[str, str] | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Call the layout functions of the ``LayoutSubject`` that ``factory`` makes, and report.

    Args:
        factory: makes the adapter.
        name: what the report calls it.
        profile: how many random calls follow the small ones: ``pr``, ``nightly`` or ``soak``.
        seed: the seed of the random calls.
        only: ids of checks (default: the family ``layout``).
        calls: replaces the cases by pairs of a function's name and a ``Call``.
        expected: ids of checks that are known to fail, with the reason.
        recipe: how ``rollproof replay`` makes the adapter again.
        progress: called while the run goes on.

    Raises ``SubjectError`` for a subject that declares no layout or has no function,
    ``UsageError`` for a profile or check that does not exist.
    """
    check_factory(factory, "judge_layouts()")
    options = Options(
        name=as_name(name),
        profile=profile,
        seed=as_seed(seed) or 0,
        only=as_names(only, "only"),
        expected=as_expected(expected),
        recipe=as_recipe(recipe),
        progress=progress,
    )
    return run(factory, options, calls)


def run(
    factory: SubjectFactory, options: Options, calls: Iterable[tuple[str, Call]] | None = None
) -> Report:
    """Judge a ``LayoutSubject`` on ``calls`` (default: those of the profile)."""
    started = time.perf_counter()
    registry = default_registry().select(options.only or ("layout",))
    trace = record_layouts(
        factory,
        name=options.name,
        profile=options.profile,
        seed=options.seed,
        calls=calls,
        functions=functions_read(registry),
        recipe=options.recipe,
        progress=options.progress,
    )
    return make_report(
        judge(trace, registry).results,
        subject=trace.header.subject,
        profile=options.profile,
        seed=options.seed,
        started=started,
        cases=len(trace.events),
        expected=options.expected,
        canary=_canary(trace),
    )


def record_layouts(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int = 0,
    calls: Iterable[tuple[str, Call]] | None = None,
    functions: Container[str] | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Trace:
    """Record one ``Laid`` event per call of the subject's functions.

    ``functions`` limits which are called. Raises as ``judge_layouts``.
    """
    label = name or factory_name(factory)
    if profile not in _DRAWS:
        raise UsageError(f"No profile is named {profile!r}; choose one of {list(_DRAWS)}.")
    subject = _make(factory, label)
    names = [
        name for name in functions_of(subject, label) if functions is None or name in functions
    ]
    draws, numbers = _DRAWS[profile], bool(getattr(subject, "numbers", True))
    made = (
        calls
        if calls is not None
        else (
            (name, call)
            for name in names
            for call in layout_calls(name, subject.layout, seed=seed, draws=draws, numbers=numbers)
        )
    )
    recorder = Recorder(lambda: 0.0)
    for done, (function, call) in enumerate(made):
        if progress is not None:
            progress(Progress(done=done, total=0, what=f"{label}: call {done + 1:,}, {function}"))
        if (
            _reason(subject, function, call, label) is None
            and (event := _call(subject, function, call)) is not None
        ):
            recorder.record(event)
    return recorder.trace(
        Header(
            subject=label,
            contract=_CONTRACT,
            seed=seed,
            profile=profile,
            recipe=recipe,
            about="layouts",
        )
    )


def _make(factory: SubjectFactory, label: str) -> Any:
    try:
        return factory()
    except RollproofError:
        raise
    except Exception as error:
        raise SubjectError(
            f"{label} could not be created: {describe_error_with_place(error)}."
        ) from error


def _reason(subject: Any, function: str, call: Call, label: str) -> str | None:
    """Return why the subject does not offer this call, or ``None``."""
    supports = getattr(subject, "supports", None)
    if supports is None:
        return None
    try:
        reason = supports(function, call.layout)
    except Exception as error:
        raise SubjectError(
            f"{label}.supports({function!r}, layout) raised"
            f" {describe_error_with_place(error)}. It returns a reason, or None."
        ) from error
    if not isinstance(reason, str | None):
        raise SubjectError(
            f"{label}.supports({function!r}, layout) returns the reason why a call is not offered,"
            f" or None, not {reason!r}."
        )
    return reason


def _call(subject: Any, function: str, call: Call) -> Laid | None:
    """Make one call; return ``None`` if the function does not offer it.

    Any other exception is a refusal, which the checks judge.
    """
    made = FUNCTIONS[function]
    arguments = made.arguments(call)
    event = Laid(function=function, given=call.to_dict())
    try:
        value = getattr(subject, function)(call.layout, **arguments)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except NotImplementedError:
        return None  # LayoutSubject documents it as "not offered"
    except BaseException as error:  # noqa: BLE001 - a refusal is an outcome, an exit too
        return replace(event, refused=describe_error(error))
    if inspect.iscoroutine(value):
        value.close()
        return replace(
            event,
            misfit=(
                "a coroutine: layout functions are called as they are, without a loop, so `async`"
                " has no place here"
            ),
        )
    changed = _changed(arguments, made.arguments(call))
    try:
        return replace(event, out=made.returned(value), changed=changed)
    except Misfit as misfit:
        return replace(event, misfit=str(misfit), changed=changed)


def _changed(used: Mapping[str, Any], fresh: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments that the function changed."""
    return tuple(name for name, value in used.items() if not _same(value, fresh[name]))


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, type(right)) and np.array_equal(left, right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(
            _same(a, b) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(
            _same(value, right[key]) for key, value in left.items()
        )
    if hasattr(left, "routes"):
        return _same(left.routes, right.routes)
    return bool(left == right)


_CANARIES: Mapping[str, str] = {
    "context": "layout.context",
    "targets": "layout.targets",
    "pack": "layout.packing",
    "tensor_slice": "layout.tensor-slice",
    "ulysses": "layout.ulysses-slice",
    "flatten": "layout.flatten-order",
    "complete": "layout.final-row",
    "unpad": "layout.unpadding",
    "merge": "layout.merge",
    "select": "layout.layer-map",
    "stage_layers": "layout.stages",
}
"""Functions whose result the self-test turns by one place, and the check that must find it."""


def _canary(trace: Trace) -> Canary:
    """Turn the rows that one correct call returned by one place: its check must find it."""
    registry = default_registry()
    for event in trace.events:
        if not isinstance(event, Laid) or event.function not in _CANARIES:
            continue
        turned = _turned(event)
        if turned is None:
            continue
        plant = Plant(
            f"what {event.function} returned, turned by one place",
            _CANARIES[event.function],
            partial(_instead_of_first, turned),
        )
        # alone: a judgement of the whole trace for every call would take minutes
        canary = try_canary([replace(trace, events=(event,))], registry, (plant,))
        if canary.planted is not None:
            return canary
    return Canary(
        planted=None,
        expected_by=None,
        red=False,
        reason="no correct call was suitable for planting a fault",
    )


def _instead_of_first(event: Laid, trace: Trace) -> Iterator[Trace]:
    yield replaced(trace, 0, event)


def _turned(event: Laid) -> Laid | None:
    """Return the call with its last array turned by one place; ``None`` if that changes nothing."""
    if not event.out or "defect" in event.given:
        return None
    last = event.out[-1]
    turned = np.roll(last, 1, axis=0) if last.ndim else last + 1
    if np.array_equal(last, turned):
        return None
    return replace(event, out=(*event.out[:-1], turned))
