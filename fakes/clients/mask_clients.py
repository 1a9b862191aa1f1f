"""Reference clients whose samples carry sampling masks."""

from __future__ import annotations

from dataclasses import replace

from rollproof.core.contract import Contract
from rollproof.core.records import EngineOutput, Request, Rollout
from rollproof.core.sampling_masks import SamplingMask
from rollproof.fakes.clients.resuming import AsSampled, PartialSample
from rollproof.fakes.engine.fleet import Fleet

__all__ = ["AsSampledMasks"]


class AsSampledMasks(AsSampled):
    """Every call requests sampling masks, and each token keeps its own: one list of ids a token,
    empty for the environment's and for those that came without one.
    """

    def start(self, fleet: Fleet) -> None:
        """Start without masks."""
        super().start(fleet)
        self._masks: dict[str, list[SamplingMask]] = {}

    def declared(self, fleet: Fleet) -> Contract:
        """Return the contract on this fleet."""
        return replace(super().declared(fleet), sampling_masks=True)

    async def rollout(self, request: Request) -> Rollout | None:
        """Return one sample; ``None`` if it was dropped."""
        try:
            return await super().rollout(request)
        finally:
            self._masks.pop(request.request_id, None)

    def wants_masks(self, sample: PartialSample) -> bool:
        """Return True."""
        return True

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        """Add a reply and its masks."""
        super().absorb(sample, sent, output)
        self.masks(sample).append(self.new_masks(sample, output))

    def masks(self, sample: PartialSample) -> list[SamplingMask]:
        """Return the masks of the response so far, in parts."""
        return self._masks.setdefault(sample.request.request_id, [])

    def new_masks(self, sample: PartialSample, output: EngineOutput) -> SamplingMask:
        """Return the masks of a reply's tokens: those that a stop sequence left of them."""
        count, mask = len(output.token_ids), output.sampling_mask
        return SamplingMask.none(count) if mask is None else mask.cut(0, count)

    def take_back(self, sample: PartialSample, count: int) -> None:
        """Drop the last tokens of the response, and their masks."""
        super().take_back(sample, count)
        masks = SamplingMask.joined(self.masks(sample))
        self._masks[sample.request.request_id] = [masks.cut(0, len(sample.response))]

    def observe(self, sample: PartialSample, answer: tuple[int, ...]) -> None:
        """Append tokens that the policy did not sample; they have no masks."""
        super().observe(sample, answer)
        self.masks(sample).append(SamplingMask.none(len(answer)))

    def finished(self, sample: PartialSample) -> Rollout:
        """Return the sample as the trainer gets it."""
        return replace(super().finished(sample), sampling_mask=self.joined_masks(sample))

    def joined_masks(self, sample: PartialSample) -> SamplingMask | None:
        """Return the masks of the response."""
        return SamplingMask.joined(self.masks(sample))
