"""The real SGLang on a CPU, judged by the conformance suite; the fake is held to it. Takes minutes:
`nox -s engines` runs it.

One engine process per setting of the run, and one run per session.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip(
    "sglang",
    reason="SGLang is not installed here (`nox -s engines` installs it)",
    exc_type=ImportError,
)

from rollproof.core.contract import Logprobs
from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.engine_protocol import EngineSettings, Query, WeightUpdate
from rollproof.core.events.rollout import Reference
from rollproof.core.records import EngineOutput, FinishReason, LogprobArray
from rollproof.core.trace import Trace
from rollproof.engines.calibration import differences
from rollproof.engines.engine_targets import fake_target
from rollproof.engines.reference_model import ReferenceModel
from rollproof.engines.session import Serving, Session
from rollproof.engines.sglang.sglang_engine import SglangEngine, incremental
from rollproof.engines.version_attribution import attributed
from rollproof.errors import EngineDied, EngineRefused, EngineStartError, UsageError
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.fakes.tiny_models import make_pair
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineRun, judged, run_experiments
from tests.support.engine_leftovers import leftovers
from tests.support.real_engine import (
    STALE,
    assert_only_expected_failures,
    assert_rounding,
    assert_situations,
    run_everything,
)

EXPECTED = {
    "engine.paused-calls": (
        "SGLang 0.5.21 forgets the abort of a call that waits for the end of a pause"
        " (docs/track-record.md)"
    ),
    "stitch.logprobs-length": (
        "SGLang 0.5.21 returns a logprob beside no token to a call without a budget"
        " (docs/track-record.md)"
    ),
}
FAULTY = {"parked", "refusals"}
"""The experiments in which they show."""
pytestmark = pytest.mark.filterwarnings("ignore")  # what SGLang and its parts warn of is not ours


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> EngineRun:
    """Every experiment on the real engine, once; nothing of it is left."""
    return run_everything("sglang", tmp_path_factory, pytestconfig)


@pytest.fixture(scope="module")
def report(run: EngineRun) -> Report:
    """The verdicts on that run."""
    return judged("sglang", run, expected=EXPECTED)


def test_every_check_passes_but_for_what_is_known(report: Report) -> None:
    """Rows, logprobs, versions and replies are as declared and as an independent forward has them;
    what fails is on record.
    """
    assert_only_expected_failures(report, EXPECTED)


def test_the_run_reaches_its_situations(report: Report) -> None:
    """Calls were retracted, prefixes cached, calls aborted before and after their first token,
    weights changed under running calls.
    """
    assert_situations(report)


def test_the_fake_does_what_the_real_engine_does(run: EngineRun) -> None:
    """In every experiment the fake shows the facts that the real engine shows, but for those where
    the real engine is at fault.
    """
    crowded = replace(incremental(FLAVOURS["sglang"]), logprobs=Logprobs.RAW)

    def fake(settings: EngineSettings) -> FakeEngineSubject:
        return FakeEngineSubject(settings, crowded if settings.kv_tokens else "sglang")

    facts = differences(run_experiments(fake_target("sglang", make=fake)).traces, run.traces)
    assert {} == {name: differing for name, differing in facts.items() if name not in FAULTY}


def test_the_gap_in_float32_is_rounding(run: EngineRun) -> None:
    """Under one version, no logprob is 1e-4 from that of the independent forward at the call's
    temperature.
    """
    profiles = {"plain", "cached", "temperature", "resent", "resumed", "crowded"}
    assert_rounding(run, profiles, _declared)


class Forgetful(SglangEngine):
    """Says that the radix cache was emptied with an update, and keeps it."""

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(replace(update, clear_cache=False))


def _declared(trace: Trace, reference: Reference) -> LogprobArray:
    """The reference's logprobs in the mode of the setting that recorded the trace."""
    return (
        reference.logprobs if trace.header.contract.logprobs is Logprobs.RAW else reference.scaled
    )


def on_engine(
    folder: Path, work: Callable[[SglangEngine, Mapping[str, Path]], Awaitable[None]]
) -> None:
    """Do ``work`` on an engine of its own, with the checkpoints that it can have by their versions.
    Nothing is left.
    """
    before = leftovers("sglang")
    checkpoints = dict(zip("AB", make_pair(folder, "qwen3_moe"), strict=True))

    async def main() -> None:
        engine = Forgetful(EngineSettings(model=checkpoints["A"], extra={"load": "tensors"}))
        try:
            await engine.start()
            await work(engine, checkpoints)
        finally:
            await engine.stop()

    asyncio.run(main())
    assert set() == leftovers("sglang") - before


async def answer(
    engine: SglangEngine, handle: str, tokens: int, seen: asyncio.Event | None = None
) -> EngineOutput:
    """One call of ten tokens of prompt; ``seen`` is set with its third token."""

    def watch(piece: object) -> None:
        if seen is not None and getattr(piece, "sampled", 0) >= 3:
            seen.set()

    query = Query(
        handle=handle,
        prompt_ids=tuple(range(5, 15)),
        max_tokens=tokens,
        stream=StreamMode.CUMULATIVE,
    )
    (output,) = await engine.generate(query, watch)
    return output


async def stale_cache(engine: SglangEngine, checkpoints: Mapping[str, Path]) -> set[str]:
    """The checks that fail where a prefix of the old weights is served after an update that cleared
    the cache, as it says.
    """
    session = Session(engine, "stale", Serving(version="A", label="w0", checkpoints=checkpoints))
    prompt = session.prompt(60)
    await session.finish(session.send(prompt, 4))
    await session.update("B", clear_cache=True)
    await session.finish(session.send(prompt, 4))
    trace = attributed(session.trace("sglang"), ReferenceModel(checkpoints, engine.contract))
    return {result.id for result in judged("sglang", EngineRun(traces=[trace])).failed}


def test_tensors_labels_refusals_and_the_death_of_a_child(tmp_path: Path) -> None:
    """Weights come as tensors, too; a radix cache that survives them is caught; a pause that SGLang
    does not have is refused; a killed scheduler is told with the log.
    """

    async def work(engine: SglangEngine, checkpoints: Mapping[str, Path]) -> None:
        failed = await stale_cache(engine, checkpoints)
        assert {"weights.no-stale-cache", "routes.prefix-cache"} <= failed <= STALE
        await engine.clear_cache()
        seen = asyncio.Event()
        call = asyncio.ensure_future(answer(engine, "spans", 40, seen))
        await seen.wait()
        await engine.pause(PauseMode.IN_PLACE, clear_cache=False)
        with pytest.raises(EngineRefused, match="flush_cache failed"):
            await engine.clear_cache()
        await engine.update_weights(
            WeightUpdate(path=checkpoints["A"], version="A", label="w2", clear_cache=False)
        )
        await engine.resume()
        assert ["w1", "w2"] == [span.version for span in (await call).spans]
        with pytest.raises(
            UsageError, match=r"SGLang has no pause keep; it has \['abort', 'retract', 'in-place'\]"
        ):
            await engine.pause(PauseMode.KEEP, clear_cache=True)
        with pytest.raises(EngineRefused, match="has no safetensors"):
            await engine.update_weights(
                WeightUpdate(path=tmp_path / "nowhere", version="C", label="w3")
            )
        assert FinishReason.LENGTH == (await answer(engine, "after", 3)).finish_reason
        scheduler = next(pid for pid in _children(engine.process.pid) if "scheduler" in _title(pid))
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(EngineDied, match="sglang is gone"):
            await answer(engine, "lost", 200)

    on_engine(tmp_path, work)


def test_a_start_that_cannot_succeed(tmp_path: Path) -> None:
    """A folder without a checkpoint, and an argument that SGLang does not have, are told at once;
    nothing is left.
    """
    before = leftovers("sglang")
    first, _ = make_pair(tmp_path, "qwen3_moe")
    with pytest.raises(EngineStartError, match="is not the folder of a checkpoint"):
        SglangEngine(EngineSettings(model=tmp_path / "nowhere"))
    engine = SglangEngine(EngineSettings(model=first, extra={"no_such_argument": 1}))
    with pytest.raises(
        EngineStartError, match=r"cannot be started: TypeError(.|\n)*no_such_argument"
    ):
        asyncio.run(engine.start())
    assert set() == leftovers("sglang") - before


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
