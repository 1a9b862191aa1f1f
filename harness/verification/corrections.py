"""Corrections: run a stack's own on made batches, and judge weights, masks, metrics and losses.

Needs no engine and no model. Torch is imported only for a subject that declares ``arrays="torch"``.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import Arrays, CorrectionTerms, FloatType
from rollproof.core.error_text import describe_error_with_place
from rollproof.core.events.corrections import Corrected, Purpose
from rollproof.core.progress import Progress
from rollproof.core.records import FloatArray
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Header, Recorder, Trace
from rollproof.corrections.correction_cases import CorrectionCase, correction_cases
from rollproof.corrections.correction_subject import correction_terms_of
from rollproof.corrections.expected_correction import ExpectedCorrection, Inputs
from rollproof.corrections.returned_correction import (
    CorrectionMisfit,
    as_metrics,
    as_number,
    as_tokens_array,
    missing_parts,
)
from rollproof.errors import RollproofError, SubjectError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.report import Report
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

__all__ = ["judge_corrections", "record_corrections"]

_DRAWS: Mapping[str, int] = {"pr": 4, "nightly": 60, "soak": 1000}
"""Batches of each situation, by profile."""
_LOGPROBS = ("rollout", "old", "current")
_WITH_GRADIENTS = frozenset({Purpose.FORMULA, Purpose.BOUNDS, Purpose.LOSS})
"""Situations in which gradients are taken: it takes longer than all else."""


def judge_corrections(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int = 0,
    only: Iterable[str] = (),
    cases: Iterable[CorrectionCase] | None = None,
    expected: Mapping[str, str] | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Correct the made batches with the ``CorrectionSubject`` that ``factory`` makes, and report.

    Args:
        factory: makes the adapter.
        name: what the report calls it.
        profile: how many random batches there are: ``pr``, ``nightly`` or ``soak``.
        seed: the seed of the random batches.
        only: ids of checks (default: the family ``correction``).
        cases: replaces the batches.
        expected: ids of checks that are known to fail, with the reason.
        recipe: how the adapter is made again.
        progress: called while the run goes on.

    Raises ``SubjectError`` for a subject that does not implement the protocol, ``UsageError`` for a
    profile or check that does not exist.
    """
    check_factory(factory, "judge_corrections()")
    options = Options(
        name=as_name(name),
        profile=profile,
        seed=as_seed(seed) or 0,
        only=as_names(only, "only"),
        expected=as_expected(expected),
        recipe=as_recipe(recipe),
        progress=progress,
    )
    return run(factory, options, cases)


def run(
    factory: SubjectFactory, options: Options, cases: Iterable[CorrectionCase] | None = None
) -> Report:
    """Judge a ``CorrectionSubject`` on ``cases`` (default: those of the profile)."""
    started = time.perf_counter()
    registry = default_registry().select(options.only or ("correction",))
    trace = record_corrections(
        factory,
        name=options.name,
        profile=options.profile,
        seed=options.seed,
        cases=cases,
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
        canary=try_canary([trace], registry, _PLANTS),
    )


def record_corrections(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int = 0,
    cases: Iterable[CorrectionCase] | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Trace:
    """Record one ``Corrected`` event per case. Raises as ``judge_corrections``."""
    label = name or factory_name(factory)
    if profile not in _DRAWS:
        raise UsageError(f"No profile is named {profile!r}; choose one of {list(_DRAWS)}.")
    subject = _make(factory, label)
    terms = correction_terms_of(subject.contract)
    made = correction_cases(terms, seed, _DRAWS[profile]) if cases is None else cases
    # without a clock: the same seed makes the same trace
    recorder = Recorder(lambda: 0.0)
    for done, case in enumerate(made):
        if progress is not None:
            progress(Progress(done=done, total=0, what=f"{label}: batch {done + 1:,}"))
        recorder.record(_correct(subject, terms, case))
    return recorder.trace(
        Header(
            subject=label,
            contract=subject.contract,
            seed=seed,
            profile=profile,
            recipe=recipe,
            about="corrections",
        )
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
    contract = getattr(subject, "contract", None)
    if not callable(getattr(subject, "correct", None)) or not isinstance(contract, Contract):
        raise SubjectError(
            f"{label} made a {type(subject).__name__} without `correct` or a `contract`: a"
            " CorrectionSubject has both (rollproof.corrections)."
        )
    if contract.correction is None:
        raise SubjectError(
            f"The contract of {label} declares no correction terms: make it with"
            " rollproof.corrections.correction_contract."
        )
    return subject


def _correct(subject: Any, terms: CorrectionTerms, case: CorrectionCase) -> Corrected:
    """Correct one batch. What the subject raises is a refusal, which the checks judge."""
    case_inputs = case.inputs
    # the arrays of the case: those of the batch are the subject's to spoil
    event = Corrected(
        name=case.name,
        purpose=case.purpose,
        rollout=case_inputs.rollout,
        old=case_inputs.old,
        current=case_inputs.current,
        mask=case_inputs.mask,
        advantages=case_inputs.advantages,
        groups=case_inputs.groups,
        versions=case_inputs.versions,
        current_version=case_inputs.current_version,
    )
    batch = (
        _torch_batch(case_inputs, terms)
        if terms.arrays is Arrays.TORCH
        else _batch(case_inputs, terms)
    )
    try:
        # numpy warns of an overflow that the next line clamps; under `-W error` it would raise
        with np.errstate(all="ignore"):
            returned = subject.correct(batch)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a refusal is an outcome, an exit too
        return replace(
            event, refused=describe_error_with_place(error), changed=_changed(batch, case_inputs)
        )
    if inspect.iscoroutine(returned):
        returned.close()
        return replace(event, misfit="a coroutine: a correction is called as it is, without a loop")
    if not isinstance(returned, Correction):
        return replace(
            event,
            misfit=f"a {type(returned).__name__}: expected a rollproof.corrections.Correction",
        )
    event = replace(event, changed=_changed(batch, case_inputs))
    try:
        return _filled(event, returned, terms, batch)
    except CorrectionMisfit as misfit:
        return replace(event, misfit=str(misfit))


def _filled(
    event: Corrected, returned: Correction, terms: CorrectionTerms, batch: CorrectionBatch
) -> Corrected:
    """Return the event with what the subject returned. Raises ``CorrectionMisfit``."""
    lacks = missing_parts(returned, terms)
    if lacks:
        raise CorrectionMisfit(f"a correction without {' and '.join(lacks)}")
    shape = event.mask.shape
    kept = None
    if returned.mask is not None and terms.rejects_mask:
        case_inputs = as_tokens_array(returned.mask, "the mask", shape)
        # one number a sequence says nothing of its masked tokens: those stay masked
        own_shape = np.shape(returned.mask) == shape
        kept = case_inputs if own_shape else case_inputs * event.mask
    gradients = event.purpose in _WITH_GRADIENTS
    return replace(
        event,
        weights=(
            as_tokens_array(returned.weights, "the weights", shape) if terms.weights else None
        ),
        kept=kept,
        metrics=as_metrics(returned.metrics, terms),
        loss=None if returned.loss is None else as_number(returned.loss, "the loss"),
        weights_gradient=_weights_gradient(returned, batch, event) if gradients else None,
        loss_gradient=_loss_gradient(returned, batch, event) if gradients else None,
    )


def _batch(case_inputs: Inputs, terms: CorrectionTerms) -> CorrectionBatch:
    kind = np.dtype(str(terms.dtype))
    return CorrectionBatch(
        rollout=case_inputs.rollout.astype(kind),
        old=case_inputs.old.astype(kind),
        current=case_inputs.current.astype(kind),
        mask=case_inputs.mask.copy(),
        advantages=case_inputs.advantages.astype(_advantage_type(terms)),
        groups=case_inputs.groups.copy(),
        versions=case_inputs.versions.copy(),
        current_version=case_inputs.current_version,
    )


def _advantage_type(terms: CorrectionTerms) -> np.dtype[Any]:
    return np.dtype("float64" if terms.dtype is FloatType.FLOAT64 else "float32")


def _torch_batch(case_inputs: Inputs, terms: CorrectionTerms) -> CorrectionBatch:
    try:
        import torch
    except ImportError as error:
        raise SubjectError(
            "The contract declares arrays='torch', and torch is not installed:"
            " `pip install torch`, or declare arrays='numpy'."
        ) from error

    def logprobs(values: FloatArray) -> Any:
        # a copy: from_numpy shares memory, and the subject may write into it
        tensor = torch.from_numpy(values.copy()).to(getattr(torch, str(terms.dtype)))
        # of all three, so that a gradient to the wrong policy shows
        return tensor.requires_grad_()

    return CorrectionBatch(
        rollout=logprobs(case_inputs.rollout),
        old=logprobs(case_inputs.old),
        current=logprobs(case_inputs.current),
        mask=torch.from_numpy(case_inputs.mask.copy()),
        advantages=torch.from_numpy(case_inputs.advantages.astype(_advantage_type(terms))),
        groups=torch.from_numpy(case_inputs.groups.copy()),
        versions=torch.from_numpy(case_inputs.versions.copy()),
        current_version=case_inputs.current_version,
    )


def _changed(batch: CorrectionBatch, case_inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the inputs that the subject changed."""
    names = (*_LOGPROBS, "mask", "advantages", "groups", "versions")
    changed = []
    for name in names:
        value = getattr(batch, name)
        now = value.detach().double().numpy() if hasattr(value, "detach") else value
        before = getattr(case_inputs, name)
        if now.shape != before.shape or not np.array_equal(
            now.astype(np.float64), before.astype(np.float64), equal_nan=True
        ):
            changed.append(name)
    return tuple(changed)


def _weights_gradient(
    returned: Correction, batch: CorrectionBatch, event: Corrected
) -> dict[str, FloatArray] | None:
    """Return the derivatives of the sum of advantage times weight over trained tokens."""
    weights = returned.weights
    if weights is None:
        return None
    if not hasattr(weights, "requires_grad"):
        reported = returned.weights_gradient
        if reported is None:
            return None
        return {
            name: as_tokens_array(reported[name], f"weights_gradient[{name!r}]", event.mask.shape)
            for name in _LOGPROBS
            if name in reported
        }
    import torch

    rows, tokens = event.mask.shape
    if not weights.requires_grad:
        return {name: np.zeros((rows, tokens)) for name in _LOGPROBS}
    spread = weights if tuple(weights.shape) == (rows, tokens) else weights.reshape(rows, 1)
    # with masked='any' NaN may stand there: it is left out, not multiplied by 0
    own = torch.where(batch.mask != 0, spread.double().expand(rows, tokens), 0.0)
    total = (own * batch.advantages.double()).sum()
    return dict(zip(_LOGPROBS, _derivatives(total, batch, _LOGPROBS), strict=True))


def _loss_gradient(
    returned: Correction, batch: CorrectionBatch, event: Corrected
) -> FloatArray | None:
    loss = returned.loss
    if loss is None:
        return None
    if not hasattr(loss, "requires_grad"):
        case_inputs = returned.loss_gradient
        return (
            None
            if case_inputs is None
            else as_tokens_array(case_inputs, "loss_gradient", event.mask.shape)
        )
    if not loss.requires_grad:
        return np.zeros(event.mask.shape)
    return _derivatives(loss.sum(), batch, ("current",))[0]


def _derivatives(total: Any, batch: CorrectionBatch, names: tuple[str, ...]) -> list[FloatArray]:
    import torch

    inputs = [getattr(batch, name) for name in names]
    # weights and loss share a graph; a policy that the formula never reads is unused
    found = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)
    return [
        np.zeros(tuple(own.shape)) if gradient is None else gradient.double().numpy()
        for own, gradient in zip(inputs, found, strict=True)
    ]


def _scale_weights(trace: Trace) -> Iterator[Trace]:
    """Multiply the weights of a batch by 1.25, in each batch that tests the formula in turn."""
    for place, event in enumerate(trace.events):
        if (
            isinstance(event, Corrected)
            and event.purpose is Purpose.FORMULA
            and event.weights is not None
        ):
            # one token alone: a factor common to all is what a normalisation may choose
            spoiled = event.weights.copy()
            spoiled[0, 0] *= 1.25
            yield replaced(trace, place, replace(event, weights=spoiled))


def _keep_rejected(trace: Trace) -> Iterator[Trace]:
    """Turn the mask of a batch, in each batch that tests a rejection in turn."""
    terms = trace.header.contract.correction
    for place, event in enumerate(trace.events):
        if (
            isinstance(event, Corrected)
            and event.purpose is Purpose.REJECTION
            and terms is not None
        ):
            expected = ExpectedCorrection(terms, Inputs.of(event))
            if event.kept is not None and expected.rejected.any():
                spoiled = np.where(expected.rejected, 1.0, event.kept)
                yield replaced(trace, place, replace(event, kept=spoiled))


_PLANTS = (
    Plant("a weight multiplied by 1.25", "correction.weights", _scale_weights),
    Plant("rejected tokens that are kept", "correction.mask", _keep_rejected),
)
