"""The conformance run on fake engines: clean where the fake is, red where a fault is planted, and
fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from rollproof.core.contract import Logprobs
from rollproof.core.engine_contract import PauseMode, ReplyKey, StreamMode
from rollproof.core.engine_protocol import EngineSettings, Query, Watch, WeightUpdate
from rollproof.core.events.rollout import Reference, Reply
from rollproof.core.records import EngineOutput
from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import engine_names, engine_target, fake_target
from rollproof.engines.vllm.vllm_engine import offline
from rollproof.errors import EngineDied, EngineRefused, EngineStartError, SubjectError, UsageError
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Tally
from rollproof.judging.report import Report
from rollproof.verification import engines
from rollproof.verification.engines import (
    EngineChoice,
    engine_registry,
    run_engine_conformance,
    run_experiments,
)
from rollproof.verification.options import Options
from rollproof.verification.traces import judge_events


def _report(engine: type[FakeEngineSubject], experiment: str, flavour: str = "vllm") -> Report:
    target = fake_target(flavour, make=lambda settings: engine(settings, flavour))
    return run_engine_conformance(target, experiments=[experiment])


def _failed(report: Report) -> set[str]:
    return {result.id for result in report.failed}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_fake_engine_passes_every_check(flavour: str) -> None:
    """No flavour is blamed for anything, every check that applies is exercised, and the canary goes
    red.
    """
    report = run_engine_conformance(f"fake-{flavour}")
    verdicts = {result.id: (result.verdict, result.reason) for result in report.results}
    assert {} == {
        name: found
        for name, found in verdicts.items()
        if found[0] in (Verdict.FAIL, Verdict.UNKNOWN)
    }
    assert report.canary is not None
    assert report.canary.red
    assert () == report.notes


def test_what_an_engine_does_not_offer_is_not_asked_of_it() -> None:
    """Without aborts, pauses and streams (vLLM's offline LLM) the checks of them do not apply, and
    the others are exercised.
    """
    flavour = offline(FLAVOURS["vllm"])
    report = run_engine_conformance(
        fake_target("vllm", make=lambda settings: FakeEngineSubject(settings, flavour))
    )
    verdicts = {result.id: result.verdict for result in report.results}
    assert set() == {
        name for name, verdict in verdicts.items() if verdict in (Verdict.FAIL, Verdict.UNKNOWN)
    }
    ruled_out = {
        "lifecycle.abort-hits-target",
        "lifecycle.abort-keeps-tokens",
        "engine.stream",
        "engine.paused-calls",
    }
    assert ruled_out <= {
        name for name, verdict in verdicts.items() if verdict is Verdict.NOT_APPLICABLE
    }
    assert Verdict.PASS is verdicts["weights.no-stale-cache"]


def test_what_an_engine_does_not_show_is_not_asked_of_it() -> None:
    """Neither the progress of one that streams nothing, nor the weights of tokens without logprobs,
    leaves a correct engine unknown.
    """
    whole = replace(FLAVOURS["vllm"], stream_modes=(StreamMode.FINAL,))
    for make in (lambda settings: FakeEngineSubject(settings, whole), _NoLogprobs):
        report = run_engine_conformance(fake_target("vllm", make=make))
        verdicts = {result.id: result.verdict for result in report.results}
        assert set() == {
            name for name, verdict in verdicts.items() if verdict in (Verdict.FAIL, Verdict.UNKNOWN)
        }
        # only a stream shows how far a call had come
        streams = make is _NoLogprobs
        expected = Verdict.PASS if streams else Verdict.NOT_APPLICABLE
        assert expected is verdicts["lifecycle.abort-keeps-tokens"]
        assert Verdict.PASS is verdicts["engine.routes"]


class _NoLogprobs(FakeEngineSubject):
    """Returns no logprobs, and says so."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        terms = self.contract.engine
        assert terms is not None
        bare = {
            name: tuple(key for key in getattr(terms, name) if key is not ReplyKey.LOGPROBS)
            for name in ("keys_finished", "keys_aborted", "keys_early", "keys_queued")
        }
        self.contract = replace(
            self.contract, logprobs=Logprobs.NONE, engine=replace(terms, **bare)
        )

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        return replace(output, logprobs=None)


class _AbortsNothing(FakeEngineSubject):
    async def abort(self, handle: str) -> None:
        return None


def test_aborts_without_effect_are_told() -> None:
    """A fast engine may have ended its calls before, so that nobody is blamed; that nothing was
    aborted is said.
    """
    report = _report(_AbortsNothing, "resent")
    assert any("or the engine does not abort" in note for note in report.notes)


def test_one_seed_gives_one_run() -> None:
    """On the virtual clock the same seed records the same events, and another seed others."""

    def events(seed: int) -> list[str]:
        return [
            repr(trace.events)
            for trace in run_experiments(
                fake_target("vllm"), only=["resent", "plain"], seed=seed
            ).traces
        ]

    assert events(3) == events(3)
    assert events(3) != events(4)


class _NeverFlushes(FakeEngineSubject):
    """Forgets to reset its prefix cache, also where it is asked to."""

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await super().pause(mode, False)

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(replace(update, clear_cache=False))


def test_a_stale_prefix_cache_is_seen() -> None:
    """KV of old weights that serves after an update which cleared the cache is a stale cache, and
    values that fit no weights.
    """
    failed = _failed(_report(_NeverFlushes, "update-abort-cleared"))
    assert {"weights.no-stale-cache", "routes.prefix-cache"} <= failed
    assert failed <= {
        "weights.no-stale-cache",
        "routes.prefix-cache",
        "engine.routes",
        "engine.logprobs",
    }


def test_kept_kv_is_no_fault_where_it_is_asked_for() -> None:
    """The same engine, asked to keep its KV, does what it declares."""
    assert set() == _failed(_report(_NeverFlushes, "update-abort"))
    assert set() == _failed(_report(_NeverFlushes, "update-keep"))


class _UpdateLater(FakeEngineSubject):
    """Acknowledges an update and goes on with the old weights."""

    async def update_weights(self, update: WeightUpdate) -> None:
        self.engine.relabel(update.label)


def test_an_update_that_does_not_take_effect_is_seen() -> None:
    """Values tell which weights computed them, whatever label is shown."""
    assert "weights.served-after-update" in _failed(_report(_UpdateLater, "update-abort-cleared"))


class _MixedUp(FakeEngineSubject):
    """Calls end in one order and their rows are handed out in another."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        (output,) = await super().generate(query, watch)
        before, self._before = self._before, output
        if (
            before is None
            or before.routes is None
            or output.routes is None
            or len(before.routes) < len(output.routes)
        ):
            return [output]
        return [replace(output, routes=before.routes[: len(output.routes)])]

    _before: EngineOutput | None = None


def test_rows_of_another_call_are_seen() -> None:
    """Shape and values are all right, and the rows are those of another call."""
    failed = _failed(_report(_MixedUp, "resent"))
    assert "engine.routes" in failed
    assert not failed & {"routes.rows", "routes.shape", "engine.rows"}


class _Reorders(FakeEngineSubject):
    """After an identity update the kernel that orders the chosen experts is another one."""

    _updated = False

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(update)
        self._updated = update.identity

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        return (
            replace(output, routes=output.routes[..., ::-1])
            if self._updated and output.routes is not None
            else output
        )


class _OneTokenShort(FakeEngineSubject):
    """Counts the first token of the budget for the prompt's."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        return await super().generate(
            replace(query, max_tokens=max(query.max_tokens - 1, 1)), watch
        )


def test_an_identity_update_that_reorders_experts_is_seen() -> None:
    """The same experts in another order are other rows to whoever weights them by place."""
    report = _report(_Reorders, "identity")
    assert {"engine.identity"} == _failed(report)
    assert "another order, in layers [1, 2, 3, 4]" in report.failed[0].findings[0].observed


def test_a_call_that_ends_by_length_too_early_is_seen() -> None:
    """A reply that says length is taken for whole."""
    report = _report(_OneTokenShort, "plain")
    assert {"engine.answers"} == _failed(report)
    assert "a call ended by length before it had the length" == report.failed[0].findings[0].title


class _DiesInPause(FakeEngineSubject):
    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        raise EngineDied(
            "the engine is gone (killed by SIGKILL). The end of its log:\nout of memory"
        )


def test_an_engine_that_dies_is_told_and_not_passed() -> None:
    """What was recorded until then is judged; the experiment that broke off is a finding with the
    log, and the run ends there.
    """
    report = run_engine_conformance(
        fake_target("vllm", make=lambda settings: _DiesInPause(settings, "vllm"))
    )
    (found,) = [result for result in report.results if result.id == "engine.answers"]
    assert Verdict.FAIL is found.verdict
    assert "out of memory" in found.findings[0].observed
    assert any("broke off" in note for note in report.notes)
    assert (
        Verdict.UNKNOWN
        is next(result for result in report.results if result.id == "engine.identity").verdict
    )


class _NoStart(FakeEngineSubject):
    stopped = 0

    async def start(self) -> None:
        raise EngineStartError(
            "the engine was not ready after 1 s. The end of its log:\nwaiting for a GPU"
        )

    async def stop(self) -> None:
        type(self).stopped += 1


def test_an_engine_that_does_not_start_is_an_error_and_is_stopped() -> None:
    """There is nothing to judge: the error reaches the caller, after the engine was stopped."""
    with pytest.raises(EngineStartError, match="waiting for a GPU"):
        run_engine_conformance(
            fake_target("vllm", make=lambda settings: _NoStart(settings, "vllm"))
        )
    assert 1 == _NoStart.stopped


class _NoSecondStart(FakeEngineSubject):
    async def start(self) -> None:
        if self.settings.kv_tokens is not None:
            raise EngineStartError(
                "vllm cannot be started: no room\nThe end of its log:\nValueError: KV cache is too"
                " small"
            )
        await super().start()


def test_a_setting_that_does_not_start_is_a_finding_beside_the_others() -> None:
    """What was recorded before is judged; the log's end is in the finding, its first line in the
    notes.
    """
    report = run_engine_conformance(
        fake_target("vllm", make=lambda settings: _NoSecondStart(settings, "vllm"))
    )
    assert {"engine.answers"} == _failed(report)
    (finding,) = next(result for result in report.results if result.id == "engine.answers").findings
    assert "KV cache is too small" in finding.observed
    assert ("the crowded setting did not start: vllm cannot be started: no room",) == report.notes


class _Told(FakeEngineSubject):
    """An engine that tells when it starts, is asked, and stops."""

    told: ClassVar[list[str]] = []

    async def start(self) -> None:
        self._tell("starts")
        await super().start()

    async def stop(self) -> None:
        self._tell("stops")
        await super().stop()

    def _tell(self, what: str) -> None:
        self.told.append(f"{'main' if self.settings.kv_tokens is None else 'crowded'} {what}")


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_engine_starts_ahead_where_there_is_room_for_two(ahead: bool) -> None:
    """Each is stopped once; the parts of the run's time are told."""
    _Told.told.clear()
    target = replace(
        fake_target("vllm", make=lambda settings: _Told(settings, "vllm")), ahead=ahead
    )
    run = run_experiments(target, only=["plain", "crowded"])
    first, last = ["main starts"], ["crowded starts"]
    assert [
        *first,
        *(last if ahead else []),
        "main stops",
        *([] if ahead else last),
        "crowded stops",
    ] == _Told.told
    assert {"starting", "stopping", "reference"} == set(run.spent)


class _Interrupted(FakeEngineSubject):
    stopped = 0

    async def abort(self, handle: str) -> None:
        raise KeyboardInterrupt

    async def stop(self) -> None:
        type(self).stopped += 1


def test_ctrl_c_stops_the_engine() -> None:
    """An interrupt in the middle of an experiment passes to the caller, after the engine was
    stopped.
    """
    with pytest.raises(KeyboardInterrupt):
        run_engine_conformance(
            fake_target("vllm", make=lambda settings: _Interrupted(settings, "vllm")),
            experiments=["resent"],
        )
    assert 1 == _Interrupted.stopped


class _RefusesAll(FakeEngineSubject):
    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        raise EngineRefused("no", kind="ValueError")


def test_an_engine_that_refuses_everything_fails() -> None:
    """A run in which nothing could be compared does not pass."""
    report = _report(_RefusesAll, "plain")
    assert {"engine.refusals"} == _failed(report)
    unknown = {result.id for result in report.results if result.verdict is Verdict.UNKNOWN}
    assert {"engine.routes", "engine.logprobs", "engine.rows"} <= unknown


def test_a_trace_without_reference_is_unknown_not_passed() -> None:
    """The checks that compare values say that there is nothing to compare with."""
    trace = run_experiments(fake_target("vllm"), only=["plain"]).traces[0]
    bare = trace.with_events(event for event in trace.events if not isinstance(event, Reference))
    tally = Tally(engine_registry(["engine.routes", "engine.logprobs"]))
    judge_events(bare.header, bare.events, tally)
    for result in tally.judgement().results:
        assert Verdict.UNKNOWN is result.verdict
        assert "no independent forward" in result.reason


def _replies(trace: Trace) -> list[Reply]:
    return [event for event in trace.events if isinstance(event, Reply)]


def test_attribution_finds_the_truth_of_the_fake() -> None:
    """What an update under keep makes of a call is found from its values alone: old rows stay, new
    tokens are of the new weights.
    """
    trace = run_experiments(fake_target("vllm"), only=["update-keep-cleared"]).traces[0]
    first = _replies(trace)[0]
    assert first.true_tokens is not None
    assert first.true_rows is not None
    assert ["A", "B"] == [span.version for span in first.true_tokens]
    assert ["A", "B"] == [span.version for span in first.true_rows]
    # the row that predicted the first new token is of the new weights
    assert first.true_rows[1].start == 40 + first.true_tokens[1].start - 1


def test_traces_of_engines_can_be_stored(tmp_path: Path) -> None:
    """A run's traces are files that can be judged again, to the same verdicts."""
    pytest.importorskip("pyarrow", reason="traces are stored with pyarrow")
    from rollproof.store import load_trace

    run_engine_conformance("fake-sglang", experiments=["plain", "queued"], save=tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert ["plain.arrow", "queued.arrow"] == files
    trace = load_trace(tmp_path / "queued.arrow")
    tally = Tally(engine_registry())
    judge_events(trace.header, trace.events, tally)
    assert () == tally.judgement().failed


def test_names_that_do_not_exist_are_refused_with_the_valid_ones(tmp_path: Path) -> None:
    """Engines, experiments and checks: each says what there is."""
    with pytest.raises(UsageError, match="fake-vllm"):
        engine_target("trt", model=None, folder=tmp_path)
    with pytest.raises(UsageError, match="update-keep-cleared"):
        run_engine_conformance("fake-vllm", experiments=["nothing"])
    with pytest.raises(UsageError, match="No check or family"):
        run_engine_conformance("fake-vllm", only=["engine.nothing"])
    with pytest.raises(UsageError, match="has no model to load"):
        engine_target("fake-vllm", model="/somewhere", folder=tmp_path)
    with pytest.raises(UsageError, match="choose among"):
        EngineChoice(engine="vlm")
    with pytest.raises(UsageError, match="a check of engines"):
        engines.run(EngineChoice(engine="fake-vllm"), Options(name="x", only=("stitch.prompt",)))
    with pytest.raises(SubjectError, match="a name or an EngineTarget, not int"):
        engines.run(lambda: 5, Options(name="x"))
    assert {"vllm", "sglang", "fake-vllm"} <= set(engine_names())


def test_settings_reach_the_engine() -> None:
    """The crowded setting has less KV than its calls need: some are preempted, or the run says that
    none were.
    """
    settings = EngineSettings(model=Path(), kv_tokens=None)
    roomy = fake_target("vllm")
    roomy = replace(roomy, settings=dict.fromkeys(roomy.settings, settings))
    run = run_experiments(roomy, only=["crowded"])
    assert [
        "not brought about in crowded: no call was preempted, or the engine does not count it"
    ] == run.notes
    assert [] == run_experiments(fake_target("vllm"), only=["crowded"]).notes
