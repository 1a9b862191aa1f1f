"""How calls end: end tokens as declared, within the context, each sample a draw of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.engine_contract import EngineTerms, Refusal, SamplingOption, StopShown
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.events.rollout import Call, Reference, Reply
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import EngineTarget, fake_target
from rollproof.engines.experiments import experiments_for
from rollproof.errors import ContractError
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.judge import Tally
from rollproof.judging.registry import Registry
from rollproof.verification.engines import run_engine_conformance, run_experiments
from rollproof.verification.traces import judge_events


def _trace(experiment: str, flavour: str = "vllm") -> Trace:
    return run_experiments(fake_target(flavour), only=[experiment]).traces[0]


def _judged(trace: Trace, check: str) -> CheckResult:
    tally = Tally(Registry([default_registry()[check]]))
    judge_events(trace.header, trace.events, tally)
    return tally.judgement().results[0]


def _replies(trace: Trace, change: Callable[[Call, EngineOutput], EngineOutput]) -> Trace:
    """The trace with other outputs."""
    calls = {event.call_id: event for event in trace.events if isinstance(event, Call)}
    return replace(
        trace,
        events=tuple(
            replace(event, output=change(calls[event.call_id], event.output))
            if isinstance(event, Reply)
            else event
            for event in trace.events
        ),
    )


def _with_terms(trace: Trace, **terms: object) -> Trace:
    """The trace of an engine that declares something else."""

    def declared(contract: Contract | None) -> Contract:
        assert contract is not None and contract.engine is not None
        return replace(contract, engine=replace(contract.engine, **terms))  # type: ignore[arg-type]

    header = trace.header
    return replace(
        trace,
        header=replace(header, engine=declared(header.engine), contract=declared(header.contract)),
    )


@pytest.fixture(scope="module")
def ends() -> Trace:
    """Calls that end at the model's end token."""
    return _trace("ends")


def _stripped(_call: Call, output: EngineOutput) -> EngineOutput:
    stopped = output.finish_reason is FinishReason.STOP
    return replace(output, token_ids=output.token_ids[:-1]) if stopped else output


def test_natural_ends_pass_and_are_counted(ends: Trace) -> None:
    """Each call of the fake ends at its end token."""
    result = _judged(ends, "engine.ends")
    assert Verdict.PASS is result.verdict
    assert result.exercised["calls that ended by stop"] >= 1


def test_a_reply_without_its_end_token_fails(ends: Trace) -> None:
    """Unless the engine declares that it strips it."""
    result = _judged(_replies(ends, _stripped), "engine.ends")
    assert Verdict.FAIL is result.verdict
    assert "its reply lacks the token that ended it" in result.findings[0].title
    assert "one of [0] at the end" == result.findings[0].expected
    declared = _with_terms(_replies(ends, _stripped), end_token=StopShown.STRIPPED)
    assert Verdict.PASS is _judged(declared, "engine.ends").verdict


def test_an_end_token_that_is_declared_as_stripped_fails(ends: Trace) -> None:
    """A client that trusts the declaration drops the last token of the answer."""
    result = _judged(_with_terms(ends, end_token=StopShown.STRIPPED), "engine.ends")
    assert Verdict.FAIL is result.verdict
    assert "token 0 at the end" == result.findings[0].observed


def test_one_token_after_the_end_token_is_one_too_many(ends: Trace) -> None:
    """At the last place it ends the call; at the last but one it did not."""

    def longer(_call: Call, output: EngineOutput) -> EngineOutput:
        more = (9,) if output.finish_reason is FinishReason.STOP else ()
        return replace(
            output, token_ids=(*output.token_ids, *more), finish_reason=FinishReason.LENGTH
        )

    result = _judged(_replies(ends, longer), "engine.ends")
    finding = result.findings[0]
    assert "a call went on after a token that ends it" == finding.title
    length = int(finding.where["index"]) + 2  # type: ignore[arg-type]
    assert f"{length} tokens; it ended by length" == finding.observed


def test_a_call_that_goes_on_after_its_end_token_fails(ends: Trace) -> None:
    """The place of the first one is named."""

    def longer(_call: Call, output: EngineOutput) -> EngineOutput:
        if output.finish_reason is not FinishReason.STOP:
            return output
        return replace(
            output, token_ids=(*output.token_ids, 9, 8), finish_reason=FinishReason.LENGTH
        )

    result = _judged(_replies(ends, longer), "engine.ends")
    assert "a call went on after a token that ends it" == result.findings[0].title


def test_an_end_token_at_the_last_place_may_be_called_length(ends: Trace) -> None:
    """There a call ends by both."""
    renamed = _replies(ends, lambda _, output: replace(output, finish_reason=FinishReason.LENGTH))
    assert () == _judged(renamed, "engine.ends").findings


def test_stop_of_a_call_that_nothing_ends_fails() -> None:
    """Calls that ignore end tokens end by length."""
    plain = _trace("plain")
    stop = _replies(plain, lambda _, output: replace(output, finish_reason=FinishReason.STOP))
    result = _judged(stop, "engine.ends")
    assert "a call ended by stop although no token ends it" == result.findings[0].title
    assert () == _judged(plain, "engine.ends").findings


def test_calls_whose_end_tokens_are_not_known_are_not_judged(ends: Trace) -> None:
    """A trace of before, or of an engine that declares none, gives no finding."""
    old = replace(
        _replies(ends, _stripped),
        events=tuple(
            replace(event, end_tokens=None) if isinstance(event, Call) else event
            for event in _replies(ends, _stripped).events
        ),
    )
    result = _judged(old, "engine.ends")
    assert (Verdict.UNKNOWN, ()) == (result.verdict, result.findings)
    silent = _with_terms(ends, end_token=None, stop_token=None, stop_string=None)
    assert Verdict.NOT_APPLICABLE is _judged(silent, "engine.ends").verdict


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_stop_tokens_and_stop_strings_end_calls(flavour: str) -> None:
    """Both are driven, and both ends are in the replies."""
    trace = _trace("stops", flavour)
    calls = {event.call_id: event for event in trace.events if isinstance(event, Call)}
    ended = [
        (bool(calls[event.call_id].stop_token_ids), bool(calls[event.call_id].stop_string_tokens))
        for event in trace.events
        if isinstance(event, Reply) and event.output.finish_reason is FinishReason.STOP
    ]
    assert [(True, False), (False, True)] == ended
    assert Verdict.PASS is _judged(trace, "engine.ends").verdict


def test_an_engine_that_strips_stop_tokens_by_design_is_clean() -> None:
    """A flavour that declares it passes every check, natural ends and stop tokens alike."""
    flavour = replace(
        FLAVOURS["vllm"],
        end_token=StopShown.STRIPPED,
        stop_token=StopShown.STRIPPED,
        stop_string=StopShown.STRIPPED,
    )
    report = run_engine_conformance(
        fake_target("vllm", make=lambda settings: FakeEngineSubject(settings, flavour)),
        experiments=["ends", "stops"],
    )
    assert [] == [result.id for result in report.failed]


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_calls_end_in_the_last_places_of_the_context(flavour: str) -> None:
    """The longest ends where the flavour ends, no call beyond the context."""
    trace = _trace("limit", flavour)
    calls = {event.call_id: event for event in trace.events if isinstance(event, Call)}
    totals = [
        len(calls[event.call_id].prompt_ids) + len(event.output.token_ids)
        for event in trace.events
        if isinstance(event, Reply)
    ]
    assert {"vllm": 256, "sglang": 254}[flavour] == max(totals)
    result = _judged(trace, "engine.length")
    assert Verdict.PASS is result.verdict
    assert len(totals) == result.exercised["calls that ended in the last 10 places"]


@pytest.mark.parametrize(("free", "counted"), [(10, False), (9, True)])
def test_the_last_places_are_ten(free: int, counted: bool) -> None:
    """A call that leaves ten places free says nothing about the end of the context."""
    trace = _trace("limit")
    # the longest call of this trace fills its 256 places
    wider = _with_terms(trace, max_length=256 + free)
    exercised = _judged(wider, "engine.length").exercised
    assert counted == ("calls that ended in the last 10 places" in exercised)


def test_a_call_beyond_the_context_fails() -> None:
    """One token is enough."""
    longer = _replies(
        _trace("limit"), lambda _, output: replace(output, token_ids=(*output.token_ids, 5))
    )
    result = _judged(longer, "engine.length")
    assert "a call went beyond the context" == result.findings[0].title
    assert "at most 256 tokens of prompt and response" == result.findings[0].expected
    undeclared = _with_terms(longer, spare_positions=None)
    assert Verdict.NOT_APPLICABLE is _judged(undeclared, "engine.length").verdict


def test_a_call_that_ends_two_places_before_the_context_needs_a_declaration() -> None:
    """SGLang's way is right for SGLang, and a finding for an engine that fills the context."""
    trace = _trace("limit", "sglang")
    assert () == _judged(trace, "engine.answers").findings
    result = _judged(_with_terms(trace, spare_positions=0), "engine.answers")
    assert "a call ended by length before it had the length" == result.findings[0].title


def test_equal_samples_fail_unless_they_are_probable() -> None:
    """Two draws of a sharp distribution agree by chance, and nobody is blamed for that."""
    trace = _trace("samples")
    assert Verdict.PASS is _judged(trace, "engine.samples").verdict
    first = next(event.output for event in trace.events if isinstance(event, Reply))
    alike = _replies(trace, lambda _, output: replace(output, token_ids=first.token_ids))
    result = _judged(alike, "engine.samples")
    assert "two samples of one call are the same" == result.findings[0].title

    def drawn_with(logprob: float) -> Verdict:
        """Return the verdict if each sample has this logprob in all."""
        return _judged(
            _replies(
                alike,
                lambda _, output: replace(
                    output, logprobs=np.array([logprob] + [0.0] * (len(output.token_ids) - 1))
                ),
            ),
            "engine.samples",
        ).verdict

    assert Verdict.UNKNOWN is drawn_with(-0.1)
    assert Verdict.UNKNOWN is drawn_with(-13.8)
    assert Verdict.FAIL is drawn_with(np.nextafter(-13.8, -14))


@pytest.mark.parametrize(
    ("temperature", "mode", "verdict"),
    [
        (0.0, "raw", Verdict.UNKNOWN),
        (0.0, "temperature-scaled", Verdict.UNKNOWN),
        (0.5, "raw", Verdict.UNKNOWN),
        (0.5, "temperature-scaled", Verdict.FAIL),
        (1.0, "raw", Verdict.FAIL),
    ],
)
def test_equal_samples_are_judged_by_the_distribution_that_drew_them(
    temperature: float, mode: str, verdict: Verdict
) -> None:
    """Greedy samples are equal, and raw logprobs say nothing of another temperature."""
    trace = _trace("samples")
    first = next(event.output for event in trace.events if isinstance(event, Reply))
    alike = _replies(trace, lambda _, output: replace(output, token_ids=first.token_ids))
    events = tuple(
        replace(event, sampling={**event.sampling, "temperature": temperature})
        if isinstance(event, Call)
        else event
        for event in alike.events
    )
    contract = replace(alike.header.contract, logprobs=mode)
    engine = None if alike.header.engine is None else replace(alike.header.engine, logprobs=mode)
    header = replace(alike.header, contract=contract, engine=engine)
    assert (
        verdict is _judged(replace(alike, header=header, events=events), "engine.samples").verdict
    )


def _references(trace: Trace, change: Callable[[Reference], Reference]) -> Trace:
    return replace(
        trace,
        events=tuple(
            change(event) if isinstance(event, Reference) else event for event in trace.events
        ),
    )


@pytest.mark.parametrize("flavour", ["vllm", "sglang", "vllm-0.26"])
@pytest.mark.parametrize("experiment", ["sampling", "sampling-crowded"])
def test_sampling_parameters_are_judged_in_every_mode(flavour: str, experiment: str) -> None:
    """Raw, scaled and processed logprobs, before and after penalties."""
    trace = _trace(experiment, flavour)
    for check in ("engine.sampling", "engine.logprobs", "engine.logprob-mode"):
        assert Verdict.PASS is _judged(trace, check).verdict


def test_a_token_that_was_left_out_fails_and_one_on_the_edge_does_not() -> None:
    """NaN in the reference says that rounding decides."""
    trace = _trace("sampling")

    def left_out(value: float) -> Callable[[Reference], Reference]:
        return lambda reference: (
            replace(reference, processed=np.full(len(reference.logprobs), value))
            if reference.processed is not None
            else reference
        )

    result = _judged(_references(trace, left_out(-np.inf)), "engine.sampling")
    assert "a token was sampled that the call's parameters leave out" == result.findings[0].title
    assert "a token that temperature 0.8, top_p=0.6 leaves" == result.findings[0].expected
    edge = _judged(_references(trace, left_out(np.nan)), "engine.sampling")
    assert Verdict.PASS is edge.verdict


def test_without_a_reference_of_penalties_their_logprobs_are_not_compared() -> None:
    """An oracle that knows no penalties leaves those calls out, and blames nobody."""
    bare = _references(
        _trace("sampling", "sglang"),
        lambda reference: replace(reference, penalised=None, penalised_scaled=None, processed=None),
    )
    assert () == _judged(bare, "engine.logprobs").findings
    assert () == _judged(bare, "engine.sampling").findings


def test_penalties_before_or_after_the_logprobs_need_a_declaration() -> None:
    """Both are right for the engine that declares them, and neither is guessed."""
    trace = _trace("sampling", "sglang")
    wrong = _judged(_with_terms(trace, penalised_logprobs=False), "engine.logprob-mode")
    # without top-p and the like, a logprob after penalties and temperature is the processed one
    assert "processed ones for all 10 tokens" in wrong.findings[0].observed
    undeclared = _judged(_with_terms(trace, penalised_logprobs=None), "engine.logprobs")
    assert () == undeclared.findings


def _terms(**changes: object) -> EngineTerms:
    values: Mapping[str, object] = {"max_length": 64, "pause_modes": (), **changes}
    return EngineTerms(**values)  # type: ignore[arg-type]


def test_terms_that_lack_a_part_are_refused() -> None:
    """Each message says what is missing."""
    with pytest.raises(ContractError, match="end_token needs end_tokens"):
        _terms(end_token=StopShown.KEPT)
    with pytest.raises(ContractError, match="stop_string needs token_text"):
        _terms(stop_string="kept")
    with pytest.raises(ContractError, match="prompt_margin=0 must be a whole number"):
        _terms(prompt_margin=0)
    with pytest.raises(ContractError, match="excess_budget holds 'never'"):
        _terms(excess_budget="never")


def test_terms_survive_their_json_form() -> None:
    """Tuples, members and absent values come back."""
    terms = _terms(
        end_tokens=(2, 5),
        end_token=StopShown.KEPT,
        sampling=(SamplingOption.TOP_K,),
        excess_budget=Refusal.IGNORED,
        spare_positions=2,
    )
    assert terms == EngineTerms(**terms.to_dict())
    assert (57, 52) == (replace(terms, prompt_margin=7).longest_prompt, terms.room_after(10))


def test_an_engine_that_declares_nothing_new_gets_the_experiments_of_before() -> None:
    """Its calls ignore end tokens, have temperature and seed alone, and are short."""
    contract = FakeEngineSubject(EngineSettings(model=Path()), "rows-T").contract
    names = {experiment.name for experiment in experiments_for(contract)}
    assert set() == names & {"ends", "stops", "limit", "sampling", "sampling-crowded"}


def test_the_other_setting_shows_the_other_mode() -> None:
    """As on real engines, one run judges two modes of logprobs."""
    target: EngineTarget = fake_target("vllm")
    modes = [target.make(settings).contract.logprobs for settings in target.settings.values()]
    assert [Logprobs.RAW, Logprobs.PROCESSED] == modes


def test_an_identity_update_counts_layers_of_the_declared_shape_only() -> None:
    """Other rows in one layer are counted; those of another shape are not."""
    trace = _trace("identity")
    last = max(event.call_id for event in trace.events if isinstance(event, Reply))

    def changed(change: Callable[[np.ndarray], np.ndarray]) -> Trace:
        return replace(
            trace,
            events=tuple(
                replace(event, output=replace(event.output, routes=change(event.output.routes)))
                if isinstance(event, Reply)
                and event.call_id == last
                and event.output.routes is not None
                else event
                for event in trace.events
            ),
        )

    def other_layer(routes: np.ndarray) -> np.ndarray:
        routes = routes.copy()
        routes[:, 2] = (routes[:, 2] + 1) % 8
        return routes

    seen = _judged(changed(other_layer), "engine.identity").findings[0]
    assert "rows differ in 1 of 5 layers (layers [2])" == seen.observed
    wider = _judged(
        changed(lambda routes: np.concatenate([routes + 1, routes], axis=1)), "engine.identity"
    )
    assert () == wider.findings
