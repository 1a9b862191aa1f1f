"""Known bugs of requests that deliver several samples: turns that are trained twice or not at all,
and samples that hold another history than the engine read.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np

from rollproof.core.case import ActionKind
from rollproof.core.contract import Samples
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.fakes.clients.resuming import ClientOptions, PartialSample
from rollproof.fakes.clients.step_clients import AsSampledBranches, AsSampledSteps
from rollproof.fakes.known_bugs._planting import ENDING, act, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]

_CONVERSATION = case(
    model=ENDING,
    requests=(request(max_tokens=48, turns=((21, 22), (23, 24), (25, 26, 27), (28, 29))),),
    seed=1,
)
"""Five turns: the history is compacted twice."""
_INTERRUPTED = replace(_CONVERSATION, actions=(act(ActionKind.ABORT, 1),))
_PAIR = replace(
    _CONVERSATION,
    requests=(
        *_CONVERSATION.requests,
        request("r1", (31, 32, 33), max_tokens=48, turns=((41, 42), (43, 44))),
    ),
)


class _BranchDeliveredTwice(AsSampledBranches):
    """Delivers the sample before the first fork when it forks, and again at the end."""

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        samples = super().delivered(finished)
        return [*samples[:1], *(replace(sample) for sample in samples)]


class _StepsOfWholeHistory(AsSampledSteps):
    """Makes all that follows the first prompt the response of each step: every step trains the
    turns before it again.
    """

    options: ClassVar[ClientOptions] = ClientOptions(multi_turn=True, samples=Samples.BRANCH)

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        begin = len(finished[0].request.prompt_ids)
        mask: list[int] = []
        logprobs: list[float] = []
        out: list[Rollout] = []
        for sample, partial in zip(super().delivered(finished), finished, strict=True):
            before = sample.prompt_ids[begin:]
            said = len(before) - len(mask)
            mask += [0] * said + partial.mask
            logprobs += [float("nan")] * said + partial.logprobs
            out.append(
                replace(
                    sample,
                    prompt_ids=sample.prompt_ids[:begin],
                    response_ids=(*before, *sample.response_ids),
                    logprobs=None if sample.logprobs is None else np.array(logprobs),
                    loss_mask=np.array(mask, dtype=np.int64),
                )
            )
        return out


class _MergeWithoutObservation(AsSampledBranches):
    """Merges the turns of a sample, and leaves out what the environment said between them."""

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.loss_mask is not None
        sampled = np.array(sample.mask, dtype=np.bool_)
        ids = np.array(rollout.response_ids, dtype=np.int64)[sampled]
        all_sampled = np.concatenate([np.ones(len(rollout.prompt_ids), dtype=np.bool_), sampled])
        routes = rollout.routes
        return replace(
            rollout,
            response_ids=tuple(ids.tolist()),
            loss_mask=rollout.loss_mask[sampled],
            logprobs=None if rollout.logprobs is None else rollout.logprobs[sampled],
            routes=None if routes is None else routes[all_sampled[: len(routes)]],
        )


class _UncompactedHistory(AsSampledBranches):
    """Sends the compacted history, and delivers samples that begin with all that came before."""

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        out: list[Rollout] = []
        before: tuple[int, ...] = ()
        for sample, partial in zip(super().delivered(finished), finished, strict=True):
            prompt = (*before, *sample.prompt_ids) if before else sample.prompt_ids
            out.append(replace(sample, prompt_ids=prompt))
            before = (*prompt, *partial.response)
        return out


class _ThinkingStaysInHistory(AsSampledSteps):
    """Sends the history without the first token of the turn before, its thought, and delivers it
    with this token.
    """

    def history(
        self, request: Request, sample: PartialSample, answer: tuple[int, ...]
    ) -> tuple[int, ...]:
        return (*sample.request.prompt_ids, *sample.response[1:], *answer)

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        out: list[Rollout] = []
        for number, sample in enumerate(super().delivered(finished)):
            if number:
                turn = finished[number - 1]
                place = len(turn.request.prompt_ids)
                ids = sample.prompt_ids
                sample = replace(sample, prompt_ids=(*ids[:place], turn.response[0], *ids[place:]))
            out.append(sample)
        return out


class _ObservationTrained(AsSampledBranches):
    """Gives what the environment said loss mask 1 in merged samples."""

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        return replace(rollout, loss_mask=np.ones(len(rollout.response_ids), dtype=np.int64))


class _LastSampleOnly(AsSampledBranches):
    """Delivers nothing but the sample after the last compaction."""

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        return super().delivered(finished)[-1:]


class _TurnReplacedByNext(AsSampledSteps):
    """Stores the samples of a conversation by the length of its history in messages, which the
    last two turns share after one of them was dropped from it.
    """

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        samples = super().delivered(finished)
        return [*samples[:-2], *samples[-1:]]


class _CallsAsTurns(AsSampledSteps):
    """Delivers each call as a sample: a turn that an abort interrupted is two steps."""

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if output.token_ids and sample.response:
            self._cuts.setdefault(sample.request.request_id, []).append(sent)
        super().absorb(sample, sent, output)

    def __init__(self) -> None:
        super().__init__()
        self._cuts: dict[str, list[int]] = {}

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        cuts = self._cuts.pop(finished[0].request.request_id, [])
        out: list[Rollout] = []
        for sample in super().delivered(finished):
            ids = (*sample.prompt_ids, *sample.response_ids)
            inner = [place for place in cuts if len(sample.prompt_ids) < place < len(ids)]
            bounds = [len(sample.prompt_ids), *inner, len(ids)]
            out += [_part(sample, begin, end) for begin, end in pairwise(bounds)]
        return out


class _SampleOfAnotherRequest(AsSampledSteps):
    """Keeps the samples of all requests in one list, and delivers the first ones that are ready."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: list[Rollout] = []

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        samples = super().delivered(finished)
        out = [*self._ready, *samples[: len(samples) - len(self._ready)]]
        self._ready = samples[len(samples) - len(self._ready) :] or samples[-1:]
        name = finished[0].request.request_id
        return [replace(sample, request_id=name) for sample in out]


def _part(sample: Rollout, begin: int, end: int) -> Rollout:
    """Return the tokens ``begin`` to ``end`` of a sample as a sample."""
    ids, first = (*sample.prompt_ids, *sample.response_ids), len(sample.prompt_ids)
    assert sample.loss_mask is not None
    return replace(
        sample,
        prompt_ids=ids[:begin],
        response_ids=ids[begin:end],
        finish_reason=sample.finish_reason if end == len(ids) else FinishReason.ABORT,
        logprobs=None if sample.logprobs is None else sample.logprobs[begin - first : end - first],
        loss_mask=sample.loss_mask[begin - first : end - first],
        routes=None if sample.routes is None else sample.routes[: end - 1],
    )


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="branch-delivered-twice",
        summary="The sample before a fork is delivered at the fork, and again at the end.",
        refs=("cf. slime#2005",),
        make=_BranchDeliveredTwice,
        cases=(_CONVERSATION,),
        detected_by=("trajectory.trained-once",),
    ),
    KnownBug(
        id="steps-of-whole-history",
        summary="Each step is the conversation so far, and trains the turns of all steps before.",
        refs=("cf. TRL#6250",),
        make=_StepsOfWholeHistory,
        cases=(_CONVERSATION,),
        detected_by=("trajectory.trained-once",),
    ),
    KnownBug(
        id="merge-without-observation",
        summary="Turns are merged into one sample without what the environment said between them.",
        refs=("cf. SkyRL#1277", "cf. SkyRL#1538"),
        make=_MergeWithoutObservation,
        cases=(_CONVERSATION,),
        detected_by=("trajectory.context",),
    ),
    KnownBug(
        id="uncompacted-history",
        summary=(
            "The engine reads a compacted history, and the sample begins with the one before it was"
            " compacted."
        ),
        refs=("cf. verl#5375",),
        make=_UncompactedHistory,
        cases=(_CONVERSATION,),
        detected_by=("trajectory.context",),
    ),
    KnownBug(
        id="thinking-stays-in-history",
        summary=(
            "A chat template drops the thoughts of earlier turns from the prompt, and the sample"
            " holds them."
        ),
        refs=("cf. verl#6854", "cf. TRL#6250"),
        make=_ThinkingStaysInHistory,
        cases=(_CONVERSATION,),
        detected_by=("trajectory.context",),
    ),
    KnownBug(
        id="observation-trained",
        summary="In a sample of several turns, what the environment said has loss mask 1.",
        refs=("cf. slime#1563",),
        make=_ObservationTrained,
        cases=(_CONVERSATION,),
        detected_by=("trajectory.sampled",),
    ),
    KnownBug(
        id="sample-of-another-request",
        summary="Samples of all trajectories are in one list, and a request gets those of others.",
        refs=("cf. miles#1930",),
        make=_SampleOfAnotherRequest,
        cases=(_PAIR,),
        detected_by=("trajectory.sampled",),
    ),
    KnownBug(
        id="last-sample-only",
        summary="Nothing but the last sample of a trajectory is delivered.",
        refs=("cf. verl#5443",),
        make=_LastSampleOnly,
        cases=(_CONVERSATION,),
        detected_by=("trajectory.complete",),
    ),
    KnownBug(
        id="turn-replaced-by-next",
        summary="A turn is lost: after the history was rewritten, the next one has its key.",
        refs=("cf. slime#2005",),
        make=_TurnReplacedByNext,
        cases=(_CONVERSATION,),
        detected_by=("trajectory.complete",),
    ),
    KnownBug(
        id="calls-as-turns",
        summary="A turn that an abort interrupted becomes two steps, one for each call.",
        refs=("cf. SkyRL#1278",),
        make=_CallsAsTurns,
        cases=(_INTERRUPTED,),
        detected_by=("trajectory.turns",),
        may_fail=("lifecycle.aborts-do-not-surface",),
    ),
)
