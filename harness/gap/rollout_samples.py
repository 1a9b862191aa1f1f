"""Rollouts whose logprobs are compared: records, or those of a recorded trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Reply, Result
from rollproof.core.events.training import Score
from rollproof.core.records import Rollout, Version, spread
from rollproof.errors import GapError, UsageError
from rollproof.gap.column_checks import FloatArray, IntArray
from rollproof.store import open_trace

__all__ = ["Sample", "read_samples", "require_logprobs", "require_routes", "samples_with_tokens"]


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """A rollout with what its trace recorded.

    Attributes:
        rollout: the rollout.
        replies: the tokens of each delivered reply.
        scores: the ``Score`` events, by version.
        temperatures: the temperatures of its calls.
    """

    rollout: Rollout
    replies: list[tuple[int, ...]] = field(default_factory=list)
    scores: dict[Version, FloatArray] = field(default_factory=dict)
    temperatures: frozenset[float] = frozenset()

    @property
    def n_tokens(self) -> int:
        """Tokens of the response."""
        return len(self.rollout.response_ids)

    @property
    def versions(self) -> list[Version] | None:
        """The version of each response token; ``None`` unless all of them have one."""
        rollout = self.rollout
        if rollout.token_versions is not None:
            versions = list(rollout.token_versions)
        elif rollout.spans:
            versions = spread(rollout.spans, self.n_tokens)
        else:
            versions = [rollout.version] * self.n_tokens
        incomplete = len(versions) != self.n_tokens or any(version is None for version in versions)
        # a token without a version could be of any weights, so no age of it is computed
        return None if incomplete else versions

    @property
    def distinct_versions(self) -> list[Version]:
        """The versions of its tokens, each once; ``[None]`` if they are unknown."""
        versions = self.versions
        return [None] if versions is None else list(dict.fromkeys(versions))

    @property
    def since_resume(self) -> IntArray | None:
        """``(response,)``: tokens since the last call began, -1 in the first call.

        ``None`` if the replies end to end are not the response.
        """
        if tuple(token for reply in self.replies for token in reply) != self.rollout.response_ids:
            return None
        parts = [np.arange(len(reply)) for reply in self.replies if reply]
        if not parts:
            return np.arange(0)
        return np.concatenate([np.full(len(parts[0]), -1), *parts[1:]])


def read_samples(trace: Path, scorer: str | None = None) -> dict[str, Sample]:
    """Return the finished rollouts of a trace by name, with the scores of ``scorer``.

    The names are ``EPISODE:ID`` if the trace has several episodes.
    """
    episodes = [_read_episode(events, scorer) for _, events in open_trace(trace).episodes()]
    if len(episodes) == 1:
        return episodes[0]
    return {
        f"{number}:{name}": sample
        for number, episode in enumerate(episodes)
        for name, sample in episode.items()
    }


def _read_episode(events: Iterable[Event], scorer: str | None) -> dict[str, Sample]:
    owner: dict[int, str] = {}
    replies: dict[str, list[tuple[int, ...]]] = {}
    scores: dict[str, dict[Version, FloatArray]] = {}
    temperatures: dict[str, set[float]] = {}
    rollouts: dict[str, Rollout] = {}
    for event in events:
        if isinstance(event, Call):
            owner[event.call_id] = event.request_id
            temperature = event.sampling.get("temperature")
            if isinstance(temperature, int | float):
                temperatures.setdefault(event.request_id, set()).add(float(temperature))
        # a reply that was lost or delivered twice is no further part of the response
        elif isinstance(event, Reply) and event.delivered and not event.duplicate:
            request_id = owner.get(event.call_id, "")
            replies.setdefault(request_id, []).append(tuple(event.output.token_ids))
        elif isinstance(event, Result) and event.rollout is not None:
            rollouts[event.request_id] = event.rollout
        elif isinstance(event, Score) and event.scorer == scorer:
            logprobs = np.asarray(event.logprobs, dtype=np.float64)
            scores.setdefault(event.request_id, {})[event.version] = logprobs
    return {
        name: Sample(
            rollout=rollout,
            replies=replies.get(name, []),
            scores=scores.get(name, {}),
            temperatures=frozenset(temperatures.get(name, ())),
        )
        for name, rollout in rollouts.items()
    }


def samples_with_tokens(rollouts: Iterable[Rollout] | Path | str) -> Mapping[str, Sample]:
    """Return the rollouts that have a response, by name."""
    if isinstance(rollouts, Path | str):
        samples = read_samples(Path(rollouts))
    elif isinstance(rollouts, Iterable):
        samples = _samples_of_records(rollouts)
    else:
        raise UsageError(
            "rollouts must be records (rollproof.Rollout) or the path of a trace, not a"
            f" {type(rollouts).__name__}."
        )
    if not any(sample.n_tokens for sample in samples.values()):
        raise GapError("There is no rollout with a response token: there is nothing to compare.")
    require_logprobs(samples)
    return {name: sample for name, sample in samples.items() if sample.n_tokens}


def _samples_of_records(rollouts: Iterable[Rollout]) -> dict[str, Sample]:
    samples: dict[str, Sample] = {}
    for rollout in rollouts:
        if not isinstance(rollout, Rollout):
            raise GapError(f"A rollout must be a rollproof.Rollout, not {type(rollout).__name__}.")
        if rollout.request_id in samples:
            raise GapError(
                f"Two rollouts are called {rollout.request_id!r}: give each its own request_id."
            )
        samples[rollout.request_id] = Sample(rollout=rollout)
    return samples


def require_logprobs(samples: Mapping[str, Sample], place: str = "") -> None:
    """Raise ``GapError`` unless every rollout has logprobs."""
    lacking = [name for name, sample in samples.items() if sample.rollout.logprobs is None]
    if lacking:
        raise GapError(
            f"{len(lacking):,} of {len(samples):,} rollouts{place} have no logprobs (the first:"
            f" {lacking[0]}): record them with logprobs."
        )


def require_routes(samples: Mapping[str, Sample]) -> None:
    """Raise ``GapError`` unless every rollout has routes."""
    lacking = [name for name, sample in samples.items() if sample.rollout.routes is None]
    if lacking:
        raise GapError(
            f"{len(lacking):,} of {len(samples):,} rollouts have no routes to replay (the first:"
            f" {lacking[0]}): record them with routes."
        )
