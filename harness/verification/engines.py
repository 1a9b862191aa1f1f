"""Engines: run experiments on an engine, real or fake, and judge what it returned.

Every engine gets the same experiments, traces and checks; its contract declares what differs. A
fake engine runs in milliseconds on a virtual clock, with the coded policy as the independent
forward; a real one runs for minutes, with a Hugging Face model as the independent forward.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollproof.core.contract import Contract
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.events.rollout import Fault
from rollproof.core.progress import Progress
from rollproof.core.subjects import EngineSubject, SubjectFactory
from rollproof.core.trace import Header, Trace
from rollproof.engines.adapter_guard import guarded
from rollproof.engines.engine_targets import (
    EngineTarget,
    engine_names,
    engine_target,
    require_installed,
)
from rollproof.engines.experiments import Experiment, Setting, experiments_for
from rollproof.engines.session import SERVER, Serving, Session
from rollproof.engines.version_attribution import attributed
from rollproof.errors import EngineDied, EngineError, EngineStartError, SubjectError, UsageError
from rollproof.invariants import default_registry
from rollproof.invariants.engine.engine_calls import BROKEN_OFF
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Tally
from rollproof.judging.registry import Registry
from rollproof.judging.report import Report
from rollproof.verification.canary import SAMPLE_PLANTS, try_canary
from rollproof.verification.options import Options
from rollproof.verification.reports import make_report, situations
from rollproof.verification.traces import judge_events

__all__ = [
    "EngineChoice",
    "EngineRun",
    "EngineTarget",
    "engine_registry",
    "judged",
    "run",
    "run_engine_conformance",
    "run_experiments",
]


_PROTOCOL = ("contract", *(name for name in vars(EngineSubject) if not name.startswith("_")))


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """An engine by name, and the model that it is judged on.

    Calling it returns it, as a factory does. Raises ``UsageError`` for a name that does not exist.
    """

    engine: str
    model: str | Path | None = None

    def __post_init__(self) -> None:
        if self.engine not in engine_names():
            raise UsageError(f"No engine is named {self.engine!r}; choose among {engine_names()}.")

    def __call__(self) -> EngineChoice:
        return self


@dataclass
class EngineRun:
    """What a run recorded.

    traces: one per experiment, with the versions that explain each value.
    notes: what went wrong or did not come about.
    seconds: the duration of each experiment.
    spent: seconds until engines were ready (``"starting"``) and had ended (``"stopping"``), and in
        independent forwards (``"reference"``).
    """

    traces: list[Trace] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the time inside as ``part``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent[part] += time.perf_counter() - began


def run(factory: SubjectFactory, options: Options) -> Report:
    """Judge the engine that ``factory`` names: an ``EngineChoice``, a name or an ``EngineTarget``.

    Raises ``UsageError`` if none of the chosen checks judges engines, ``SubjectError`` if what the
    factory makes is no engine.
    """
    choice: Any = factory()
    engine, model = (
        (choice.engine, choice.model) if isinstance(choice, EngineChoice) else (choice, None)
    )
    if not isinstance(engine, str | EngineTarget):
        raise SubjectError(
            f"engine must be a name or an EngineTarget, not {type(engine).__name__}."
        )
    if isinstance(engine, str):
        require_installed(engine)
    registry = engine_registry()
    names = {name for check in registry for name in (check.id, check.family)}
    only = [name for name in options.only if name in names]
    if options.only and not only:
        raise UsageError(
            f"None of {list(options.only)[:4]} is a check of engines; the checks of engines are"
            f" {list(registry.ids)}."
        )
    return run_engine_conformance(
        engine,
        model=model,
        only=only,
        seed=options.seed,
        expected=options.expected,
        progress=options.progress,
        save=options.counterexample_dir,
    )


def run_engine_conformance(
    engine: str | EngineTarget,
    *,
    model: str | Path | None = None,
    only: Iterable[str] = (),
    experiments: Iterable[str] = (),
    seed: int = 0,
    expected: Mapping[str, str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    save: str | Path | None = None,
) -> Report:
    """Judge an engine and return the report.

    No process, shared memory or temporary folder is left, however the run ends.

    Args:
        engine: ``vllm``, ``sglang``, ``fake-FLAVOUR``, or a target of your own.
        model: the folder of a MoE checkpoint (default: a tiny random one, made for the run).
        only: ids or families of checks.
        experiments: the experiments to run (default: all).
        seed: the seed of prompts and sampling.
        expected: ids of checks that are known to fail, with the reason.
        progress: called while the run goes on.
        save: a folder for the traces.

    Raises ``UsageError`` for a name that does not exist, ``EngineStartError`` if the engine does
    not start.
    """
    began = time.perf_counter()
    registry = engine_registry(only)
    with contextlib.ExitStack() as stack:
        target = engine
        if isinstance(target, str):
            folder = Path(tempfile.mkdtemp(prefix="rollproof-models-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            target = engine_target(target, model=model, folder=folder, seed=seed, progress=progress)
        run = run_experiments(target, only=experiments, seed=seed, progress=progress)
    if save is not None:
        _save(run.traces, Path(save))
    return judged(target.name, run, registry=registry, expected=expected, seed=seed, started=began)


def engine_registry(only: Iterable[str] = ()) -> Registry:
    """Return the checks that judge engines, or those that ``only`` names.

    Raises ``UsageError`` for a name that matches none.
    """
    registry = Registry([check for check in default_registry() if check.judges("engines")])
    return registry.select(only) if (only := tuple(only)) else registry


def run_experiments(
    target: EngineTarget,
    *,
    only: Iterable[str] = (),
    last: Iterable[str] = (),
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> EngineRun:
    """Run the experiments on ``target`` and attribute each value to the weights that explain it.

    ``only`` names the experiments to run, ``last`` those that come after all others of their
    setting because an engine may not survive them. Raises ``EngineStartError`` if the engine does
    not start.
    """
    main = _Main(target, frozenset(only), frozenset(last), seed, progress)
    if target.virtual:
        from rollproof.simulation.virtual_loop import run

        return run(main.run)
    return asyncio.run(main.run())


class _Main:
    """One run: one setting after another, each on an engine of its own."""

    def __init__(
        self,
        target: EngineTarget,
        only: frozenset[str],
        last: frozenset[str],
        seed: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._target, self._only, self._last, self._seed, self._progress = (
            target,
            only,
            last,
            seed,
            progress,
        )
        self._run = EngineRun()
        self._done = 0
        self._total = 0

    async def run(self) -> EngineRun:
        """Run everything in order and stop the engines whatever happens."""
        made = [
            (setting, self._made(settings)) for setting, settings in self._target.settings.items()
        ]
        plan = [
            (setting, engine, chosen)
            for setting, engine in made
            if (chosen := self._chosen(engine, setting))
        ]
        starts: list[asyncio.Task[None]] = []
        stopped = 0
        try:
            for place, (setting, engine, chosen) in enumerate(plan):
                self._say(f"starting {self._target.name} ({setting})")
                # with `ahead` the next engine starts meanwhile: a start takes as long as a setting
                for _, later, _ in plan[len(starts) : place + 1 + self._target.ahead]:
                    starts.append(asyncio.create_task(_started(later)))
                try:
                    with self._run.spending("starting"):
                        await starts[place]
                    await self._on(engine, setting, chosen)
                except EngineStartError as error:
                    if not self._run.traces:
                        raise
                    self._fault(engine, setting, "start", error)
                finally:
                    stopped += 1
                    with self._run.spending("stopping"):
                        await self._stop(engine, setting)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for setting, engine, _ in plan[stopped : len(starts)]:
                await self._stop(engine, setting)
        if not self._run.traces:
            names = sorted({experiment.name for experiment in self._all()})
            raise UsageError(
                f"No experiment of {sorted(self._only)} can be run on {self._target.name}; there"
                f" are {names}."
            )
        return self._run

    async def _stop(self, engine: EngineSubject, setting: Setting) -> None:
        """Stop an engine; what was recorded is judged even if it does not stop."""
        try:
            await guarded(engine.stop, "stop()", self._target.deadline)
        except EngineError as error:
            self._fault(engine, setting, "stop", error)

    def _fault(
        self, engine: EngineSubject, setting: Setting, what: str, error: EngineError
    ) -> None:
        """Record that an engine did not start or stop: a finding of its own.

        What was recorded before is judged all the same.
        """
        self._run.notes.append(
            f"the {setting} setting did not {what}: {str(error).splitlines()[0]}"
        )
        header = Header(
            subject=self._target.name,
            contract=engine.contract,
            engine=engine.contract,
            profile=str(setting),
            about="engines",
        )
        fault = Fault(index=0, what=BROKEN_OFF, server_id=SERVER, detail=str(error))
        self._run.traces.append(Trace(header=header, events=(fault,)))

    def _all(self) -> list[Experiment]:
        return [
            experiment
            for settings in self._target.settings.values()
            for experiment in experiments_for(self._made(settings).contract)
        ]

    def _made(self, settings: EngineSettings) -> EngineSubject:
        engine: object = self._target.make(settings)
        if not isinstance(engine, EngineSubject) or not isinstance(engine.contract, Contract):
            lacks = [name for name in _PROTOCOL if not hasattr(engine, name)]
            raise SubjectError(
                "A target's make() must return an EngineSubject, with its contract, before it is"
                f" started; {type(engine).__name__} lacks"
                f" {lacks or ['a Contract as its contract']}."
            )
        return engine

    def _chosen(self, engine: EngineSubject, setting: Setting) -> list[Experiment]:
        known = [
            experiment
            for experiment in experiments_for(engine.contract)
            if experiment.setting is setting
        ]
        chosen = sorted(
            (experiment for experiment in known if not self._only or experiment.name in self._only),
            key=lambda experiment: experiment.name in self._last,
        )
        self._total += len(chosen)
        return chosen

    async def _on(
        self, engine: EngineSubject, setting: Setting, chosen: Sequence[Experiment]
    ) -> None:
        settings, checkpoints = self._target.settings[setting], self._target.checkpoints[setting]
        serving = Serving(version=settings.version, label=settings.label, checkpoints=checkpoints)
        recorded: list[Trace] = []
        for experiment in chosen:
            self._say(f"{self._target.name}: {experiment.about}")
            start = time.perf_counter()
            trace, alive = await self._run_experiment(engine, settings, serving, experiment)
            self._run.seconds[experiment.name] = time.perf_counter() - start
            self._done += 1
            recorded.append(trace)
            if not alive:
                break
        oracle = self._target.oracle(engine, checkpoints)
        for trace in recorded:
            await asyncio.sleep(0)  # the forwards block the loop: Ctrl-C arrives here
            self._say(f"comparing {trace.header.profile} with the independent forward")
            with self._run.spending("reference"):
                self._run.traces.append(attributed(trace, oracle))

    async def _run_experiment(
        self,
        engine: EngineSubject,
        settings: EngineSettings,
        serving: Serving,
        experiment: Experiment,
    ) -> tuple[Trace, bool]:
        """Run one experiment; return its trace and whether the engine can run another."""
        session = Session(
            engine,
            experiment.name,
            serving,
            seed=self._seed,
            deadline=self._target.deadline,
            lull=self._target.lull,
            max_batch=settings.max_batch,
        )
        alive = True
        try:
            await experiment.run(session)
        except EngineError as error:
            session.record_failure(f"{experiment.name}: {type(error).__name__}: {error}")
            self._run.notes.append(f"{experiment.name} broke off: {str(error).splitlines()[0]}")
            alive = not isinstance(error, EngineDied) and await _recovered(engine)
        finally:
            await session.close()
        self._run.notes += [f"not brought about in {miss}" for miss in session.misses]
        return session.trace(self._target.name), alive

    def _say(self, what: str) -> None:
        if self._progress is not None:
            self._progress(Progress(done=self._done, total=self._total, what=what))


async def _started(engine: EngineSubject) -> None:
    """Start an engine. Raises ``EngineStartError`` for anything that the engine raises."""
    try:
        await guarded(engine.start, "start()", None)
    except EngineError as error:
        if isinstance(error, EngineStartError):
            raise
        raise EngineStartError(f"The engine does not start. {error}") from error


async def _recovered(engine: EngineSubject) -> bool:
    """Lift the pause that a broken experiment may have left; return whether the engine answers."""
    try:
        await guarded(engine.resume, "resume()", 30)
    except EngineError:
        return False
    return True


def judged(
    name: str,
    run: EngineRun,
    *,
    registry: Registry | None = None,
    expected: Mapping[str, str] | None = None,
    seed: int = 0,
    started: float | None = None,
) -> Report:
    """Return the report on what a run recorded that began at ``started`` (default: now)."""
    started = time.perf_counter() if started is None else started
    tally = Tally(registry if registry is not None else engine_registry())
    exercised: Counter[str] = Counter()
    clean: list[Trace] = []
    for trace in run.traces:
        before = tally.counts()
        judge_events(trace.header, trace.events, tally)
        if tally.counts() == before:
            clean.append(trace)
        exercised.update(situations(trace.events, "engines"))
    results = tally.judgement().results
    passed = Registry([result.check for result in results if result.verdict is Verdict.PASS])
    return make_report(
        results,
        subject=name,
        profile="engine",
        seed=seed,
        started=started,
        cases=tally.traces,
        expected=expected or {},
        exercised=exercised,
        canary=try_canary(clean, passed, SAMPLE_PLANTS) if clean else None,
        notes=run.notes,
    )


def _save(traces: Iterable[Trace], folder: Path) -> None:
    from rollproof.store import dump_trace

    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        dump_trace(trace, folder / f"{trace.header.profile}.arrow")
