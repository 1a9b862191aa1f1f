"""Known bugs of released stacks, found by judging them: stranded servers, turns without tokens,
tokens that were not sampled.
"""

from __future__ import annotations

from rollproof.core.case import ActionKind
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Rollout
from rollproof.fakes.clients.reference_clients import AsSampled, PartialSample
from rollproof.fakes.known_bugs._planting import EMPTY, ENDING, act, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _PauseOutsideOfTry(AsSampled):
    """Resumes after any failure that follows the pause, but not after a failure of the pause
    itself.
    """

    async def update_weights(self, version: int | None) -> None:
        servers = list(self.fleet.servers.values())
        for server in servers:
            await server.pause(PauseMode.KEEP, False)
        try:
            true = self.fleet.weights_of(version)
            for server in servers:
                await server.load(true, version, identity=true == server.version)
        finally:
            for server in servers:
                await server.resume()


class _VanishesWhenEmpty(AsSampled):
    """Returns nothing for an aborted sample without tokens: it has nothing to train on."""

    def resumes(self, sample: PartialSample) -> bool:
        return bool(sample.response)

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        return rollout if rollout is not None and rollout.response_ids else None


class _EndAppended(AsSampled):
    """Appends an end of sequence that the model did not sample."""

    def finished(self, sample: PartialSample) -> Rollout:
        sample.response.append(self.fleet.policy.eos_id)
        sample.mask.append(1)
        sample.logprobs.append(0.0)
        sample.labels.append(sample.labels[-1] if sample.labels else None)
        return super().finished(sample)


class _LogprobsOfAnswerForgotten(AsSampled):
    """Adds the logprobs of a turn together with those of its answer, and none of both if the turn
    has none.
    """

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        super().observe(sample, answer)
        del sample.logprobs[-len(answer) :]
        if sample.turn > 1:  # only the first turn's answer is forgotten
            sample.logprobs.extend([float("nan")] * len(answer))


# One of two servers is dead when an update begins.
_DEAD = case(
    act(ActionKind.KILL, 1, server="s1", steps=40),
    act(ActionKind.SYNC, 3),
    requests=(request(max_tokens=12),),
    servers=2,
)
_ANSWERED = case(
    model=ENDING, requests=(request(max_tokens=24, turns=((21, 22), (23, 24))),), seed=1
)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="pause-outside-of-try",
        summary=(
            "If the pause fails on one server during an update, the servers that were paused"
            " before stay paused."
        ),
        refs=("SkyRL worker_dispatch.py (0.3.0, 0.4.0)",),
        make=_PauseOutsideOfTry,
        cases=(_DEAD,),
        detected_by=("weights.failed-update-resumes",),
        may_fail=("lifecycle.no-hang",),
    ),
    KnownBug(
        id="vanishes-when-empty",
        summary=(
            "A call that was aborted before its first token leaves nothing to train on, and its"
            " request vanishes."
        ),
        refs=("TRL async_rollout_worker.py (1.16.0)",),
        make=_VanishesWhenEmpty,
        cases=(EMPTY,),
        detected_by=("lifecycle.drops-only-as-declared",),
    ),
    KnownBug(
        id="end-appended",
        summary=(
            "An end of sequence that the model did not sample is appended, with a logprob of 0.0,"
            " and trained on."
        ),
        refs=("SkyRL skyrl_gym_generator.py (use_conversation_multi_turn=False)", "cf. SkyRL#2078"),
        make=_EndAppended,
        cases=(case(),),
        detected_by=("stitch.tokens",),
    ),
    KnownBug(
        id="logprobs-of-answer-forgotten",
        summary=(
            "The environment's answer has no places among the logprobs: those of later turns"
            " belong to other tokens."
        ),
        refs=("cf. SkyRL skyrl_gym_generator.py (TurnOutput.get_turn_rollout_logprobs)",),
        make=_LogprobsOfAnswerForgotten,
        cases=(_ANSWERED,),
        detected_by=("stitch.logprobs-length",),
        # tokens without a logprob are masked out, and those are the wrong ones here
        may_fail=("stitch.mask",),
    ),
)
