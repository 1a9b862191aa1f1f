"""Known bugs of batches: finished samples whose fields are lost, displaced, cast or made up on
their way into training rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from rollproof.core.records import BatchRow, IntArray, LogprobArray, Rollout
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_batches import Collator, PaddedBatch
from rollproof.verification.batches import record_batches

__all__ = ["BUGS"]


class _FailsOnEmpty(Collator):
    def check(self, sample: Rollout) -> None:
        if not sample.response_ids:
            raise ZeroDivisionError("float division by zero")
        super().check(sample)


class _WritesReadOnly(Collator):
    def routes(self, sample: Rollout) -> IntArray:
        if sample.routes is not None:
            sample.routes[...] = sample.routes
        return super().routes(sample)


class _PadsInPlace(Collator):
    def logprobs(self, sample: Rollout) -> LogprobArray:
        row = super().logprobs(sample)
        if sample.logprobs is not None and sample.logprobs.flags.writeable:
            sample.logprobs[:] = np.nan_to_num(sample.logprobs) - 1.0
        return row


class _DropsRemainder(Collator):
    """Leaves out the last sample where the number of samples is odd."""

    def collate(self, samples: list[Rollout]) -> PaddedBatch:
        return super().collate(samples[:-1] if len(samples) % 2 and len(samples) > 1 else samples)


class _FillsUpWithCopies(Collator):
    """Repeats the first sample until the batch divides by four."""

    def collate(self, samples: list[Rollout]) -> PaddedBatch:
        return super().collate([*samples, *samples[:1] * (-len(samples) % 4)])


class _WrongPrefix(Collator):
    """Places the tokens as if every prompt were one token longer."""

    def tokens(self, sample: Rollout) -> IntArray:
        return np.roll(super().tokens(sample), -1)


class _MaskPaddedWithOnes(Collator):
    def loss_mask(self, sample: Rollout) -> IntArray:
        mask = super().loss_mask(sample)
        mask[self.left + len(sample.response_ids) :] = 1
        return mask


class _AttentionAsLossMask(Collator):
    def loss_mask(self, sample: Rollout) -> IntArray:
        mask = self.attention(sample)
        mask[: self.left] = 0
        return mask


class _LogprobsLeftAligned(Collator):
    """Pads the logprobs as if every prompt were as long as the longest, less one: the shift of
    labels, done twice.
    """

    def logprobs(self, sample: Rollout) -> LogprobArray:
        return np.roll(super().logprobs(sample), -1)


class _Bfloat16(Collator):
    def logprobs(self, sample: Rollout) -> LogprobArray:
        bits = super().logprobs(sample).astype(np.float32).view(np.uint32)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


class _DropsLogprobs(Collator):
    def rows(self, batch: PaddedBatch) -> list[BatchRow]:
        return [replace(row, logprobs=None) for row in super().rows(batch)]


class _RoutesNotShifted(Collator):
    """Pads the tokens on the left and their routes on the right."""

    def routes(self, sample: Rollout) -> IntArray:
        return np.roll(super().routes(sample), -self.start(sample), axis=0)


class _EightBits(Collator):
    def routes(self, sample: Rollout) -> IntArray:
        return super().routes(sample).astype(np.uint8)


class _ZeroFilled(Collator):
    """Zeros where nothing was captured, and nothing that marks them."""

    def routes(self, sample: Rollout) -> IntArray:
        return np.maximum(super().routes(sample), 0)

    def rows(self, batch: PaddedBatch) -> list[BatchRow]:
        return [replace(row, routed=None) for row in super().rows(batch)]


class _FirstDecides(Collator):
    def has_routes(self, samples: list[Rollout]) -> bool:
        return samples[0].routes is not None


class _TakesAnything(Collator):
    def check(self, sample: Rollout) -> None:
        """Lengths that do not fit are padded."""


def _bug(
    name: str,
    summary: str,
    refs: tuple[str, ...],
    make: type[Collator],
    *kills: str,
    also: tuple[str, ...] = (),
) -> KnownBug:
    return KnownBug(
        id=name,
        summary=summary,
        refs=refs,
        record=partial(record_batches, make, name=name),
        kills=kills,
        also=also,
    )


BUGS: tuple[KnownBug, ...] = (
    _bug(
        "batch-fails-on-empty",
        "A sample without response tokens makes the conversion of the whole batch raise.",
        ("verl#6675", "verl#5860"),
        _FailsOnEmpty,
        "batch.accepts",
    ),
    _bug(
        "batch-writes-read-only",
        "The conversion writes into the samples' arrays, and read-only ones make it raise.",
        ("verl#5519",),
        _WritesReadOnly,
        "batch.accepts",
    ),
    _bug(
        "batch-pads-in-place",
        "The conversion changes the samples that it was given.",
        ("verl#5519",),
        _PadsInPlace,
        "batch.input",
    ),
    _bug(
        "batch-drops-remainder",
        "Samples that do not fill a micro-batch are left out.",
        ("AReno#524",),
        _DropsRemainder,
        "batch.complete",
    ),
    _bug(
        "batch-filled-with-copies",
        "A batch is filled up with copies of its first sample, which count as samples.",
        ("slime#2124",),
        _FillsUpWithCopies,
        "batch.complete",
    ),
    _bug(
        "batch-wrong-prefix",
        "Tokens are placed by a prompt length that is off by one, beside an attention mask that is"
        " not.",
        ("AReno#524",),
        _WrongPrefix,
        "batch.tokens",
    ),
    _bug(
        "batch-mask-padded-with-ones",
        "The loss mask is padded with ones.",
        ("verl#3805", "rllm#508"),
        _MaskPaddedWithOnes,
        "batch.padding",
    ),
    _bug(
        "batch-attention-as-loss-mask",
        "The attention mask is used as loss mask: tool output is trained on.",
        ("verl#2543",),
        _AttentionAsLossMask,
        "batch.loss-mask",
    ),
    _bug(
        "batch-logprobs-shifted",
        "Logprobs stand one place before their tokens.",
        ("SkyRL#1304", "prime-rl#1525"),
        _LogprobsLeftAligned,
        "batch.logprobs",
    ),
    _bug(
        "batch-logprobs-in-bfloat16",
        "Logprobs are rounded to bfloat16.",
        ("slime#245",),
        _Bfloat16,
        "batch.logprobs",
    ),
    _bug(
        "batch-logprobs-dropped",
        "The batch carries no logprobs.",
        ("slime#1995", "SkyRL#1815"),
        _DropsLogprobs,
        "batch.logprobs",
    ),
    _bug(
        "batch-routes-not-shifted",
        "Tokens are padded on the left, their routes on the right.",
        ("slime#1052", "slime#2175"),
        _RoutesNotShifted,
        "batch.routes",
    ),
    _bug(
        "batch-ids-in-eight-bits",
        "Expert ids are cast to eight bits.",
        ("verl#5240",),
        _EightBits,
        "batch.expert-ids",
    ),
    _bug(
        "batch-zero-filled",
        "Places without a row hold zeros: expert 0, top_k times, for every one of them.",
        ("verl agent_loop.py (0.9.1)", "slime#941", "verl#7841"),
        _ZeroFilled,
        "batch.filler",
        also=("batch.mixed",),
    ),
    _bug(
        "batch-first-sample-decides",
        "Whether the batch has routes is read off its first sample.",
        ("verl agent_loop.py (0.9.1)",),
        _FirstDecides,
        "batch.mixed",
    ),
    _bug(
        "batch-takes-anything",
        "Fields whose lengths do not fit the tokens are padded without a word.",
        ("verl agent_loop.py (0.9.1)", "ROLL functionals.py", "verl#6027", "vime#70"),
        _TakesAnything,
        "batch.refuses",
    ),
)
"""Known bugs of batches."""
