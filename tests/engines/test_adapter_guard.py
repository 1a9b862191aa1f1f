"""Adapters that raise, hang, or return what is no output: told in words of our own, and what was
recorded is judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import EngineOutput
from rollproof.engines.engine_targets import fake_target
from rollproof.errors import EngineStartError, SubjectError
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.judging.checks import Verdict
from rollproof.judging.report import Report
from rollproof.verification.engines import run_engine_conformance

ERRORS = (ValueError, TimeoutError, asyncio.CancelledError, SystemExit)


def _with(method: str, act: Callable[[], Any]) -> type[FakeEngineSubject]:
    """A fake engine whose ``method`` does that, and no more."""

    async def instead(_self: FakeEngineSubject, *_: Any) -> Any:
        return await act()

    return type("_Faulty", (FakeEngineSubject,), {method: instead})


def _raising(error: type[BaseException]) -> Callable[[], Any]:
    async def act() -> None:
        raise error("boom")

    return act


async def _never() -> None:
    await asyncio.Event().wait()


def _report(engine: type[FakeEngineSubject], *experiments: str) -> Report:
    return run_engine_conformance(
        fake_target("vllm", make=lambda settings: engine(settings, "vllm")), experiments=experiments
    )


def _texts(report: Report) -> str:
    (found,) = [result for result in report.failed if result.id == "engine.answers"]
    return found.findings[0].observed


_ASKED_IN = {
    "abort": "resent",
    "pause": "update-keep",
    "resume": "update-keep",
    "update_weights": "identity",
    "clear_cache": "cached",
    "counters": "crowded",
}


@pytest.mark.parametrize("method", _ASKED_IN)
def test_what_a_method_raises_is_a_finding(method: str) -> None:
    """An error that is not of rollproof ends the experiment and neither the run nor, by
    ``SystemExit``, the program.
    """
    for error in ERRORS:
        texts = _texts(_report(_with(method, _raising(error)), "plain", _ASKED_IN[method]))
        assert f"{method}(" in texts
        assert f"raised {error.__name__}" in texts
        assert "boom" in texts


@pytest.mark.parametrize("method", [*_ASKED_IN, "stop"])
def test_a_method_that_never_returns_is_a_finding(method: str) -> None:
    """Every wait has the target's deadline."""
    texts = _texts(
        _report(
            _with(method, _never), "plain", *([_ASKED_IN[method]] if method in _ASKED_IN else [])
        )
    )
    assert f"{method}(" in texts
    assert "did not return within" in texts


def test_a_call_that_raises_is_refused() -> None:
    """The protocol lets an engine refuse by any error; a call that can be served must not be."""
    for error in (ValueError, TimeoutError, asyncio.CancelledError):
        (failed,) = _report(_with("generate", _raising(error)), "plain").failed
        assert "engine.refusals" == failed.id
        assert f"{error.__name__}: boom" == failed.findings[0].observed


def test_an_engine_that_does_not_go_on_is_not_waited_for_without_end() -> None:
    """After a resume that does nothing no token comes: neither a call nor a wait for its tokens
    hangs.
    """

    async def nothing() -> None:
        return None

    report = _report(_with("resume", nothing), "update-abort", "update-keep")
    assert {"engine.answers", "lifecycle.no-hang"} == {result.id for result in report.failed}
    assert any("has 0 of 4 tokens" in note for note in report.notes)


@pytest.mark.parametrize("error", ERRORS)
def test_a_start_that_raises_is_a_start_error(error: type[BaseException]) -> None:
    """Whatever it raises, as its text says."""
    with pytest.raises(EngineStartError, match=rf"raised {error.__name__}.*boom"):
        _report(_with("start", _raising(error)), "plain")


@pytest.mark.parametrize("error", ERRORS)
def test_a_stop_that_raises_takes_nothing_from_the_report(error: type[BaseException]) -> None:
    """Something may be left running: that is a finding beside what was recorded."""
    report = _report(_with("stop", _raising(error)), "plain")
    assert f"raised {error.__name__}" in _texts(report)
    assert {"engine.answers"} == {result.id for result in report.failed}
    assert any("main setting did not stop" in note for note in report.notes)


def _showing(change: Callable[[EngineOutput], Any]) -> type[FakeEngineSubject]:
    async def generate(self: FakeEngineSubject, *arguments: Any) -> Any:
        return [change(output) for output in await FakeEngineSubject.generate(self, *arguments)]

    return type("_Faulty", (FakeEngineSubject,), {"generate": generate})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _: None, "sequence of EngineOutput"),
        (
            lambda output: replace(output, token_ids=7),
            "token_ids must be a sequence of integers",
        ),
        (lambda output: replace(output, token_ids=(-1,)), "must be 0 or more, not -1"),
        (
            lambda output: replace(output, routes=output.routes[0]),
            r"integers \(rows, layers, top_k\)",
        ),
        (lambda output: replace(output, routes=output.routes.astype(float)), "array of float64"),
        (
            lambda output: replace(output, logprobs=output.logprobs[:, None]),
            "logprobs must be numbers or None on one axis",
        ),
        (lambda output: replace(output, finish_reason="weird"), "choose among"),
        (lambda output: replace(output, routes_start=None), "routes_start must be a whole number"),
        (lambda output: replace(output, cached_tokens="3"), "cached_tokens must be a whole number"),
        (lambda output: replace(output, spans=None), "tuple of Span"),
    ],
)
def test_what_is_no_output_is_refused(change: Callable[[EngineOutput], Any], text: str) -> None:
    """Checks count on the types of a record; a value that has another one is named, with what it
    should be.
    """
    with pytest.raises(SubjectError, match=text):
        _report(_showing(change), "plain")


def test_lists_and_plain_words_are_taken_for_what_they_say() -> None:
    """A list of logprobs, an array of ids, a finish reason as text: nothing is blamed for the
    container.
    """

    def plain(output: EngineOutput) -> Any:
        assert output.logprobs is not None
        return replace(
            output,
            token_ids=np.array(output.token_ids),
            logprobs=output.logprobs.tolist(),
            finish_reason=str(output.finish_reason),
        )

    assert () == _report(_showing(plain), "plain", "resent", "streams").failed


def test_a_reply_too_many_is_seen() -> None:
    """Two outputs for one sample: the call was answered twice."""

    async def twice(self: FakeEngineSubject, *arguments: Any) -> Any:
        return [*await FakeEngineSubject.generate(self, *arguments)] * 2

    report = _report(type("_Twice", (FakeEngineSubject,), {"generate": twice}), "plain", "resent")
    (found,) = [result for result in report.failed if result.id == "engine.answers"]
    assert "a call was answered more than once" == found.findings[0].title


def test_a_target_that_cannot_be_driven_is_refused() -> None:
    """No adapter, no terms, no second version of the weights: each is named, before or where it is
    needed.
    """
    with pytest.raises(SubjectError, match=r"object lacks .*generate"):
        run_engine_conformance(fake_target("vllm", make=lambda _: object()))  # type: ignore[arg-type,return-value]

    class _NoTerms(FakeEngineSubject):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.contract = replace(self.contract, engine=None)

    with pytest.raises(SubjectError, match="no `engine` terms"):
        _report(_NoTerms, "plain")
    target = fake_target("vllm")
    with pytest.raises(SubjectError, match="two versions"):
        run_engine_conformance(
            replace(
                target,
                checkpoints={name: {"A": one["A"]} for name, one in target.checkpoints.items()},
            )
        )


def test_an_engine_of_delta_streams_alone_is_not_blamed() -> None:
    """Several samples of one call, too, are what their chunks make; one that never streams is not
    asked to.
    """
    for modes in ((StreamMode.DELTA,), ()):
        flavour = replace(FLAVOURS["vllm"], stream_modes=modes)
        target = fake_target(
            "vllm", make=lambda settings, flavour=flavour: FakeEngineSubject(settings, flavour)
        )  # type: ignore[misc]
        report = run_engine_conformance(target, experiments=["samples", "streams"])
        (found,) = [result for result in report.results if result.id == "engine.stream"]
        assert found.verdict is (Verdict.PASS if modes else Verdict.NOT_APPLICABLE)


@pytest.mark.parametrize("answer", [None, 5])
def test_counters_that_are_no_mapping_are_refused(answer: object) -> None:
    """Their reader would fail on them."""

    async def counters() -> object:
        return answer

    with pytest.raises(SubjectError, match="mapping of names to numbers"):
        _report(_with("counters", counters), "crowded")
