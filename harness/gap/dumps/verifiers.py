"""Episodes of verifiers, which prime-rl writes too: ``traces.jsonl``, an episode a line.

Read at verifiers a60a606 (``verifiers/v1/graph.py``, ``trace.py``, ``episode.py``) and prime-rl
559b447 (``monitors/file.py``). A trace is a tree of messages; each path from a root to a leaf is a
training sample. A message has the logprobs of its sampled tokens alone. Routes and the trainer's
logprobs are not written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from rollproof.core.records import FloatArray, Version
from rollproof.errors import GapError
from rollproof.gap.dumps.dumped_samples import Dump, DumpedSample, whole_sequence
from rollproof.gap.dumps.json_lines import first_line, read_lines

__all__ = ["is_one", "read"]

_FILE = "traces.jsonl"


class _Message(msgspec.Struct):
    parent: int | None = None
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []


class _Agent(msgspec.Struct):
    trainable: bool = True


class _Trace(msgspec.Struct):
    id: str
    nodes: list[_Message] = []
    agent: _Agent = msgspec.field(default_factory=_Agent)


class _Policy(msgspec.Struct):
    start: int
    end: int


class _Work(msgspec.Struct):
    policy: _Policy | None = None


class _Run(msgspec.Struct):
    work: _Work | None = None


class _Episode(msgspec.Struct):
    traces: list[_Trace]
    run: _Run | None = None


def is_one(path: Path) -> bool:
    """Whether this is such a file, or the folder that holds one."""
    if path.is_dir():
        return (path / _FILE).is_file()
    traces = first_line(path).get("traces") if path.is_file() else None
    return isinstance(traces, list) and all(isinstance(trace, dict) for trace in traces)


def read(path: Path) -> Dump:
    """Return the samples of a file: a sample for each path through a trainable trace.

    A message that several paths share is counted in the first of them. Raises ``GapError``.
    """
    file = path / _FILE if path.is_dir() else path
    samples = [
        sample
        for number, episode in read_lines(file, _Episode)
        for trace in episode.traces
        if trace.agent.trainable
        for sample in _samples(f"{file}, line {number}, trace {trace.id}", trace, _version(episode))
    ]
    _require_distinct(samples)
    return Dump(framework="verifiers", samples=samples, lacking="verifiers writes none")


def _version(episode: _Episode) -> Version:
    """Return the weights that sampled all of an episode, if those are known to be the same."""
    work = None if episode.run is None else episode.run.work
    policy = None if work is None else work.policy
    # updates may come during an episode, and which turn had which weights is not written
    return policy.start if policy is not None and policy.start == policy.end else None


def _samples(place: str, trace: _Trace, version: Version) -> Iterator[DumpedSample]:
    seen: set[int] = set()
    for branch, path in enumerate(_paths(place, trace.nodes)):
        messages = [trace.nodes[node] for node in path]
        logprobs = [_spread(place, message) for message in messages]
        counted = [
            # paths share their beginning, which would else weigh as often as it was continued
            np.asarray(message.mask, dtype=bool) & (node not in seen)
            for node, message in zip(path, messages, strict=True)
        ]
        seen.update(path)
        # not those that are counted: a shared turn is masked here, and yet in the response
        sampled = np.concatenate([np.asarray(message.mask, dtype=bool) for message in messages])
        yield whole_sequence(
            f"{trace.id}/{branch}",
            token_ids=[token for message in messages for token in message.token_ids],
            mask=np.concatenate(counted),
            rollout_logprobs=np.concatenate(logprobs),
            version=version,
            first=int(np.argmax(sampled)) if sampled.any() else len(sampled),
        )


def _paths(place: str, messages: list[_Message]) -> Iterator[list[int]]:
    """Yield the messages of each path from a root to a leaf, in the order of the leaves."""
    parents = [message.parent for message in messages]
    for node, parent in enumerate(parents):
        # a parent is written before its children, so that no path is endless
        if parent is not None and not 0 <= parent < node:
            raise GapError(f"{place}: message {node} follows message {parent}, which is not there.")
    for leaf in sorted(set(range(len(messages))) - set(parents)):
        path, node = [], leaf
        while True:
            path.append(node)
            parent = parents[node]
            if parent is None:
                break
            node = parent
        yield path[::-1]


def _spread(place: str, message: _Message) -> FloatArray:
    """Return a logprob for each token of a message, 0 where none was sampled."""
    mask = np.asarray(message.mask, dtype=bool)
    if len(mask) != len(message.token_ids) or len(message.logprobs) != mask.sum():
        raise GapError(
            f"{place}: a message has {len(message.token_ids):,} tokens, {len(mask):,} places in its"
            f" mask, {int(mask.sum()):,} of them sampled, and {len(message.logprobs):,} logprobs:"
            " one is needed for each sampled token."
        )
    values = np.zeros(len(mask))
    values[mask] = message.logprobs
    return values


def _require_distinct(samples: list[DumpedSample]) -> None:
    """Raise ``GapError`` if a trace is there twice: its tokens would be counted twice."""
    names: set[str] = set()
    for sample in samples:
        name = sample.rollout.request_id
        if name in names:
            raise GapError(
                f"Trace {name.rpartition('/')[0]} is in the file twice: a resumed run wrote it"
                " again, or files were joined. Remove one of them."
            )
        names.add(name)
