"""Fuzzing targets, the inputs of one spread over processes that are forked after all imports."""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import itertools
import json
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from tools.fuzz.mutations import Changes, Inputs
from tools.fuzz.target import Target
from tools.fuzz.targets import TARGETS

__all__ = ["Amount", "Outcome", "Shard", "State", "fuzz", "read_inputs"]

_HANG_SECONDS = 20.0
_START_SECONDS = 120.0
"""How long the first input may take: it imports what its target needs, on a busy machine."""
_MEMORY = 4 << 30
_SHARD = 5_000
"""Inputs of one process at most: what grows with every input shows within as many."""
_POLL_SECONDS = 0.02
_COUNTER = struct.Struct("q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The inputs that one process reads.

    Attributes:
        name: of the target.
        seed: of the run; an input is a function of the target, the seed and its number.
        start: number of the first input.
        inputs: how many; ``None`` reads until the time is up.
        seconds: for a shard without a number of inputs.
    """

    name: str
    seed: int
    start: int = 0
    inputs: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much is fuzzed.

    Attributes:
        seconds: for each target, in one process.
        inputs: for each target instead, in processes of at most 5,000 inputs each.
        seed: an input is a function of the target, the seed and its number.
        start: number of the first input.
        processes: how many run at once.
        within: seconds after which no further process is started; what is left is not counted.
    """

    seconds: float = 60.0
    inputs: int | None = None
    seed: int = 0
    start: int = 0
    processes: int = 1
    within: float = float("inf")

    def shards(self, name: str) -> list[Shard]:
        """What each process of one target reads."""
        if self.inputs is None:
            return [Shard(name=name, seed=self.seed, start=self.start, seconds=self.seconds)]
        size = max(1, min(_SHARD, self.inputs // self.processes))
        end = self.start + self.inputs
        return [
            Shard(name=name, seed=self.seed, start=first, inputs=min(size, end - first))
            for first in range(self.start, end, size)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What became of one shard: inputs read, seconds, seconds of processors, MiB, and a problem."""

    inputs: int = 0
    seconds: float = 0.0
    processors: float = 0.0
    memory: int = 0
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one target.

    Attributes:
        name: of the target.
        inputs: how many were read.
        seconds: of all processes together.
        processors: seconds that their processors worked.
        memory: MiB of the largest process.
        problems: what went wrong, with the input.
    """

    name: str
    inputs: int
    seconds: float
    processors: float
    memory: int
    problems: Sequence[str]

    def __str__(self) -> str:
        outcome = "FAILED" if self.problems else "ok" if self.inputs else "not run"
        row = (
            f"{self.name:<20}{self.inputs:>9,}{self.seconds:>9.1f}{self.processors:>9.1f}"
            f"{self.memory:>7,}  {outcome}"
        )
        return "\n    ".join([row, *(line for each in self.problems for line in each.split("\n"))])


@dataclass(kw_only=True, slots=True)
class _Process:
    """A process that reads a shard, as its parent sees it."""

    shard: Shard
    pid: int
    counter: mmap.mmap
    state: IO[bytes]
    errors: IO[bytes]
    begun: float = field(default_factory=time.monotonic)
    seen: int = 0
    since: float = field(default_factory=time.monotonic)

    def hangs(self) -> bool:
        """Whether it has been at one input for too long."""
        number, now = _COUNTER.unpack(self.counter[:])[0], time.monotonic()
        if number != self.seen:
            self.seen, self.since = number, now
        return now - self.since > (_HANG_SECONDS if number > 1 else _START_SECONDS)

    def ended(self, status: int) -> State:
        """Return what became of it, from what it left."""
        code = os.waitstatus_to_exitcode(status)
        self.state.seek(0)
        written = self.state.read()
        if written:
            return State(**json.loads(written))
        read = _COUNTER.unpack(self.counter[:])[0]
        number = self.shard.start + max(0, read - 1)
        self.errors.seek(0)
        # the trace comes first, then a list of all extension modules
        said = self.errors.read().decode(errors="replace")[:1500]
        value = _input(TARGETS[self.shard.name].inputs(), self.shard, number)
        return State(
            inputs=read,
            seconds=time.monotonic() - self.begun,
            problem=f"{_where(self.shard, number)}: the process ended with {code} at the input"
            f" {_shown(value)}\n{said}",
        )

    def close(self) -> None:
        for file in (self.counter, self.state, self.errors):
            file.close()


def fuzz(names: Sequence[str], amount: Amount) -> list[Outcome]:
    """Fuzz targets, and print the line of each once it is done."""
    begun = time.monotonic()
    # here, so that no process has to
    _import_all(names)
    waiting = iter([shard for name in names for shard in amount.shards(name)])
    states: dict[str, list[State]] = {name: [] for name in names}
    left = {name: len(amount.shards(name)) for name in names}
    outcomes: dict[str, Outcome] = {}
    for shard, state in _run(waiting, amount, begun):
        left[shard.name] -= 1
        if state is not None:
            states[shard.name].append(state)
        if not left[shard.name]:
            outcomes[shard.name] = _outcome(shard.name, states[shard.name])
            print(outcomes[shard.name], flush=True)
    return [outcomes[name] for name in names]


def _outcome(name: str, states: Sequence[State]) -> Outcome:
    return Outcome(
        name=name,
        inputs=sum(state.inputs for state in states),
        seconds=sum(state.seconds for state in states),
        processors=sum(state.processors for state in states),
        memory=max((state.memory for state in states), default=0),
        problems=list(dict.fromkeys(state.problem for state in states if state.problem)),
    )


def _import_all(names: Sequence[str]) -> None:
    for module in dict.fromkeys(m for name in names for m in TARGETS[name].modules):
        with contextlib.suppress(ImportError):
            __import__(module)


def _run(
    waiting: Iterator[Shard], amount: Amount, begun: float
) -> Iterator[tuple[Shard, State | None]]:
    """Run shards in processes, so many at once; yields each with its state when it has ended.

    The state is ``None`` if the time was up before the shard began.
    """
    running: list[_Process] = []
    try:
        while True:
            for shard in itertools.islice(waiting, amount.processes - len(running)):
                if time.monotonic() > begun + amount.within:
                    yield shard, None
                else:
                    running.append(_forked(shard))
            if not running:
                if (shard := next(waiting, None)) is None:
                    return
                waiting = itertools.chain([shard], waiting)
            for process in list(running):
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if not pid and process.hangs():
                    # faulthandler then writes where it was
                    os.kill(process.pid, signal.SIGABRT)
                    pid, status = os.waitpid(process.pid, 0)
                if pid:
                    running.remove(process)
                    yield process.shard, process.ended(status)
                    process.close()
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)


def _forked(shard: Shard) -> _Process:
    """Start a process for a shard: a copy of this one, which has no threads yet."""
    counter = mmap.mmap(-1, _COUNTER.size)
    state, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - kept open
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return _Process(shard=shard, pid=pid, counter=counter, state=state, errors=errors)
    code = 1
    try:
        os.dup2(errors.fileno(), 2)
        faulthandler.enable(errors)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        result = read_inputs(TARGETS[shard.name], shard, counter)
        state.write(json.dumps({name: getattr(result, name) for name in State.__slots__}).encode())
        state.flush()
        code = 0
    finally:
        # nothing of the parent may run here: neither its exit handlers nor its finally clauses
        os._exit(code)


def read_inputs(target: Target, shard: Shard, counter: mmap.mmap | None = None) -> State:
    """Read the inputs of a shard in this process, up to the first that fails.

    Args:
        target: what reads them.
        shard: which inputs.
        counter: is set to how many were begun, for whoever watches this process.
    """
    begun, count, problem = time.monotonic(), 0, None
    inputs = target.inputs()
    with target.around() as running:
        for number in itertools.count(shard.start):
            if (
                count >= shard.inputs
                if shard.inputs is not None
                else time.monotonic() - begun > shard.seconds
            ):
                break
            count += 1
            if counter is not None:
                counter[:] = _COUNTER.pack(count)
            try:
                target.read(_input(inputs, shard, number), running)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
                problem = _problem(target, inputs, shard, number, running, error)
                break
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return State(
        inputs=count,
        seconds=time.monotonic() - begun,
        processors=sum(each.ru_utime + each.ru_stime for each in used),
        memory=used[0].ru_maxrss >> 10,
        problem=problem,
    )


def _problem(
    target: Target,
    inputs: Inputs,
    shard: Shard,
    number: int,
    running: Any,
    error: BaseException,
) -> str:
    """Describe what went wrong, by an input with as few changes as show it."""
    changes = Changes(_seed(shard, number))
    inputs(changes)
    left_out: frozenset[int] = frozenset()
    for each in range(changes.count):
        try:
            target.read(_input(inputs, shard, number, left_out | {each}), running)
        except BaseException as other:  # noqa: BLE001 - as above
            if type(other) is type(error):
                left_out, error = left_out | {each}, other
    value = _input(inputs, shard, number, left_out)
    described = f"{type(error).__name__}: {error}"[:2000]
    return f"{_where(shard, number)}: {described}\ninput {_shown(value)}"


def _input(
    inputs: Inputs, shard: Shard, number: int, left_out: frozenset[int] = frozenset()
) -> Any:
    return inputs(Changes(_seed(shard, number), left_out))


def _seed(shard: Shard, number: int) -> str:
    return f"{shard.name}:{shard.seed}:{number}"


def _where(shard: Shard, number: int) -> str:
    return f"--only {shard.name} --seed {shard.seed} --start {number} --inputs 1"


def _shown(data: Any) -> str:
    text = f"base64 {base64.b64encode(data).decode()}" if isinstance(data, bytes) else repr(data)
    return text.encode("ascii", "backslashreplace").decode()[:3000]
