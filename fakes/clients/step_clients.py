"""Reference clients that deliver several samples for a request: one for each turn, or one for each
part of a conversation whose history only grew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from rollproof.core.contract import Samples
from rollproof.core.events.rollout import Observation
from rollproof.core.records import FinishReason, Request, Rollout
from rollproof.fakes.clients.resuming import AsSampled, ClientOptions, PartialSample

__all__ = ["AsSampledBranches", "AsSampledSteps"]

_COMPACTED = 2
"""The number of answers after which a client rewrites the history."""


class AsSampledSteps(AsSampled):
    """Delivers each turn as a sample: its prompt is the conversation before it (step-wise)."""

    options: ClassVar[ClientOptions] = ClientOptions(multi_turn=True, samples=Samples.TURN)

    async def rollout(self, request: Request) -> Any:
        """Return the samples, in the order of the turns; ``None`` if they were dropped."""
        self._open += 1
        try:
            finished: list[PartialSample] = []
            sample: PartialSample | None = PartialSample(request=request)
            while sample is not None:
                # what an abort cut is no conversation any more
                if not await self.run(sample):
                    return None
                finished.append(sample)
                sample = self.next_sample(request, sample)
            return self.delivered(finished)
        finally:
            self._open -= 1

    def delivered(self, finished: list[PartialSample]) -> list[Rollout]:
        """Return the samples that the trainer gets."""
        return [self.finished(sample) for sample in finished]

    def to_record(self, native: Any) -> Any:
        """Return the samples: the native form is the record."""
        return native

    def next_sample(self, request: Request, sample: PartialSample) -> PartialSample | None:
        """Return the sample that goes on with the conversation; ``None`` at its end."""
        answer = None if sample.finish is FinishReason.ABORT else self.next_answer(sample)
        if answer is None:
            return None
        self.fleet.recorder.record(Observation(request_id=request.request_id, token_ids=answer))
        budget = sample.request.budget
        left = None if budget is None else budget - len(sample.response) - len(answer)
        return PartialSample(
            request=replace(
                request,
                prompt_ids=self.history(request, sample, answer),
                max_tokens=left,
                limit=None,
                max_length=None,
            ),
            turn=sample.turn + 1,
            # handles are of the request
            attempts=sample.attempts,
        )

    def history(
        self, request: Request, sample: PartialSample, answer: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the prompt of the next sample."""
        return (*sample.ids, *answer)

    def grows(self, sample: PartialSample) -> bool:
        """Return whether the next turn belongs to the same sample."""
        return False

    def next_turn(self, sample: PartialSample) -> bool:
        """Append the environment's answer, if the sample goes on with it."""
        return self.grows(sample) and super().next_turn(sample)


class AsSampledBranches(AsSampledSteps):
    """Merges turns into one sample as long as the history grows. After every second answer it
    compacts the history: nothing but the first prompt and the answer is left.
    """

    options: ClassVar[ClientOptions] = ClientOptions(multi_turn=True, samples=Samples.BRANCH)

    def history(
        self, request: Request, sample: PartialSample, answer: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the compacted history."""
        return (*request.prompt_ids, *answer)

    def grows(self, sample: PartialSample) -> bool:
        """Return whether the history will not be compacted after this turn."""
        return (sample.turn + 1) % _COMPACTED != 0
