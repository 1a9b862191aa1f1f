"""Known bugs of batches: fields of finished samples that padding, splitting, merging, balancing and
casting lose or displace on the way into training rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.records import BatchRow, IntArray, LogprobArray, Rollout
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_batches import CollatedBatch, Collator

__all__ = ["BUGS"]

_PAD = 0


class _BatchFailsOnEmpty(Collator):
    def check(self, sample: Rollout) -> None:
        if not sample.response_ids:
            # a mean over the response tokens
            raise ZeroDivisionError("float division by zero")
        super().check(sample)


class _BatchWritesReadOnly(Collator):
    def routes(self, sample: Rollout) -> IntArray:
        if sample.routes is not None:
            # the values stay: the write itself raises on a read-only array
            sample.routes[...] = sample.routes
        return super().routes(sample)


class _BatchPadsInPlace(Collator):
    def logprobs(self, sample: Rollout) -> LogprobArray:
        row = super().logprobs(sample)
        if sample.logprobs is not None and sample.logprobs.flags.writeable:
            # the caller sees its own sample change
            sample.logprobs[:] = np.nan_to_num(sample.logprobs) - 1.0
        return row


class _BatchDropsRemainder(Collator):
    """Leaves out the last one of an odd number of samples."""

    def collate(self, samples: list[Rollout]) -> CollatedBatch:
        return super().collate(samples[:-1] if len(samples) % 2 and len(samples) > 1 else samples)


class _BatchDropsUntrained(Collator):
    """Leaves out samples of which no token is trained."""

    def collate(self, samples: list[Rollout]) -> CollatedBatch:
        return super().collate(
            [
                sample
                for sample in samples
                if sample.loss_mask is None or sample.loss_mask.any() or not sample.response_ids
            ]
        )


class _BatchFilledWithCopies(Collator):
    """Repeats the first sample until the batch divides by four."""

    def collate(self, samples: list[Rollout]) -> CollatedBatch:
        return super().collate([*samples, *samples[:1] * (-len(samples) % 4)])


class _BatchCutToWidth(Collator):
    """Cuts samples at 16 tokens."""

    def collate(self, samples: list[Rollout]) -> CollatedBatch:
        return super().collate([self._cut(sample) for sample in samples])

    def _cut(self, sample: Rollout) -> Rollout:
        over = sample.total - 16
        if over <= 0:
            return sample
        left = len(sample.response_ids) - over
        return replace(
            sample,
            response_ids=sample.response_ids[:left],
            logprobs=None if sample.logprobs is None else sample.logprobs[:left],
            loss_mask=None if sample.loss_mask is None else sample.loss_mask[:left],
            routes=None if sample.routes is None else sample.routes[:-over],
        )


class _BatchWrongPrefix(Collator):
    """Places the tokens as if every prompt were one token longer."""

    def tokens(self, sample: Rollout) -> IntArray:
        # attention and mask stay in their places
        return np.roll(super().tokens(sample), -1)


class _BatchMaskPaddedWithOnes(Collator):
    def loss_mask(self, sample: Rollout) -> IntArray:
        mask = super().loss_mask(sample)
        # padding after the response is trained on
        mask[self.left + len(sample.response_ids) :] = 1
        return mask


class _BatchAttentionAsLossMask(Collator):
    def loss_mask(self, sample: Rollout) -> IntArray:
        # tool output is attended to, but must not be trained on
        mask = self.attention(sample)
        mask[: self.left] = 0
        return mask


class _BatchMaskByPaddingToken(Collator):
    def loss_mask(self, sample: Rollout) -> IntArray:
        # the end of sequence is the token that pads: it is never trained
        return np.where(self.tokens(sample) == _PAD, 0, super().loss_mask(sample))


class _BatchLengthByPaddingToken(Collator):
    def attention(self, sample: Rollout) -> IntArray:
        # the same place is then behind the end of the row
        return np.where(self.tokens(sample) == _PAD, 0, 1)


class _BatchLogprobsShifted(Collator):
    """Pads the logprobs as if every prompt had the greatest length less one: the shift of labels,
    done twice.
    """

    def logprobs(self, sample: Rollout) -> LogprobArray:
        return np.roll(super().logprobs(sample), -1)


class _BatchLogprobsInBfloat16(Collator):
    def logprobs(self, sample: Rollout) -> LogprobArray:
        # bfloat16 is the upper half of float32
        bits = super().logprobs(sample).astype(np.float32).view(np.uint32)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


class _BatchLogprobsClipped(Collator):
    def logprobs(self, sample: Rollout) -> LogprobArray:
        return np.maximum(super().logprobs(sample), -20.0)


class _BatchLogprobsDropped(Collator):
    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        # the trainer cannot correct for its gap to the engine
        return [replace(row, logprobs=None) for row in super().rows(batch)]


class _BatchRoutesNotShifted(Collator):
    """Pads the tokens on the left and their routes on the right."""

    def routes(self, sample: Rollout) -> IntArray:
        # the rows stay at the left end, where the padding of the tokens is
        return np.roll(super().routes(sample), -self.start(sample), axis=0)


class _BatchIdsInEightBits(Collator):
    def routes(self, sample: Rollout) -> IntArray:
        # the contract has 300 experts; astype wraps silently
        return super().routes(sample).astype(np.uint8)


class _BatchZeroFilled(Collator):
    """Fills places without a captured row with zeros, and does not mark them."""

    def routes(self, sample: Rollout) -> IntArray:
        return np.maximum(super().routes(sample), 0)

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        return [replace(row, routed=None) for row in super().rows(batch)]


class _BatchFirstSampleDecides(Collator):
    def has_routes(self, samples: list[Rollout]) -> bool:
        # a first sample without routes, e.g. an aborted one, hides all others
        return samples[0].routes is not None


class _BatchOneClearsAll(Collator):
    def collate(self, samples: list[Rollout]) -> CollatedBatch:
        batch = super().collate(samples)
        if batch.routes is None or batch.routed is None:
            return batch
        # every place of every sample becomes filler that is marked as uncaptured
        if any(sample.routes is None and sample.response_ids for sample in samples):
            batch.routes[:], batch.routed[:] = -1, 0
        return batch


class _BatchTakesAnything(Collator):
    def check(self, sample: Rollout) -> None:
        """Check nothing: other lengths are padded."""


class _BatchAlignedWithEnd(Collator):
    """Aligns fields of the response with its end, whatever their length."""

    def check(self, sample: Rollout) -> None:
        """Check nothing."""

    def logprobs(self, sample: Rollout) -> LogprobArray:
        values, count = sample.logprobs, len(sample.response_ids)
        if values is None or len(values) >= count:
            return super().logprobs(
                replace(sample, logprobs=None if values is None else values[:count])
            )
        return super().logprobs(
            replace(sample, logprobs=np.concatenate([np.zeros(count - len(values)), values]))
        )

    def loss_mask(self, sample: Rollout) -> IntArray:
        mask, count = sample.loss_mask, len(sample.response_ids)
        if mask is None:
            return super().loss_mask(sample)
        return super().loss_mask(
            replace(
                sample,
                loss_mask=np.concatenate(
                    [np.zeros(max(0, count - len(mask)), dtype=np.int64), mask[:count]]
                ),
            )
        )

    def routes(self, sample: Rollout) -> IntArray:
        return super().routes(
            sample
            if sample.routes is None
            else replace(sample, routes=sample.routes[: sample.total])
        )

    def routed(self, sample: Rollout) -> IntArray:
        return super().routed(
            sample
            if sample.routes is None
            else replace(sample, routes=sample.routes[: sample.total])
        )


class _BatchMissingRoutesMadeUp(Collator):
    """Gives a sample without routes rows of zeros, which count as captured."""

    def routes(self, sample: Rollout) -> IntArray:
        return super().routes(self._made_up(sample))

    def routed(self, sample: Rollout) -> IntArray:
        return super().routed(self._made_up(sample))

    def _made_up(self, sample: Rollout) -> Rollout:
        if sample.routes is not None or not sample.response_ids:
            return sample
        shape = (sample.total - 1, self.contract.route_layers, self.contract.top_k or 1)
        return replace(sample, routes=np.zeros(shape, dtype=np.int16))


class _PartEdited(Collator):
    """Changes the rows of a batch after the conversion, by ``edited``."""

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        return self.edited(super().rows(batch))

    def edited(self, rows: list[BatchRow]) -> list[BatchRow]:
        """Return the changed rows: each bug has its own."""
        raise NotImplementedError(f"{type(self).__name__} must override ``edited``")


class _BatchMergeLosesRoutes(_PartEdited):
    """Merges two shards by the fields of the first, and loses the routes of the second."""

    def edited(self, rows: list[BatchRow]) -> list[BatchRow]:
        half = (len(rows) + 1) // 2
        return [*rows[:half], *(replace(row, routes=None, routed=None) for row in rows[half:])]


def _by_length(rows: Iterable[BatchRow]) -> list[int]:
    """Return the order in which a balancer takes rows: the longest first."""
    lengths = [int(np.sum(row.attention)) for row in rows]
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


class _BatchLogprobsBalancedApart(_PartEdited):
    """Balances rows over ranks by length, but leaves ``field`` in the order of the samples."""

    field = "logprobs"

    def edited(self, rows: list[BatchRow]) -> list[BatchRow]:
        changes: list[dict[str, Any]] = [
            {self.field: getattr(rows[i], self.field)} for i in range(len(rows))
        ]
        return [
            replace(rows[i], **change) for i, change in zip(_by_length(rows), changes, strict=True)
        ]


class _BatchRoutesBalancedApart(_BatchLogprobsBalancedApart):
    field = "routes"


class _BatchFilterHitsNeighbour(_PartEdited):
    """Zeroes the mask of the sample next to the filtered one."""

    def edited(self, rows: list[BatchRow]) -> list[BatchRow]:
        if len(rows) < 2 or rows[1].loss_mask is None:
            return rows
        return [rows[0], replace(rows[1], loss_mask=np.zeros_like(rows[1].loss_mask)), *rows[2:]]


class _BatchZigzagNotUndone(Collator):
    """Divides rows in zigzag over two context ranks, and joins them as if each rank had one
    stretch.
    """

    def routes(self, sample: Rollout) -> IntArray:
        rows = sample.routes
        if rows is None:
            return super().routes(sample)
        parts = np.array_split(np.arange(len(rows)), 4)
        return super().routes(
            replace(sample, routes=rows[np.concatenate([parts[0], parts[3], parts[1], parts[2]])])
        )


class _BatchMissingLogprobTrained(Collator):
    """Replaces a missing logprob by 0.0, and trains on its token."""

    def logprobs(self, sample: Rollout) -> LogprobArray:
        return super().logprobs(
            sample
            if sample.logprobs is None
            else replace(sample, logprobs=np.nan_to_num(sample.logprobs))
        )

    def loss_mask(self, sample: Rollout) -> IntArray:
        if sample.loss_mask is None or sample.logprobs is None:
            return super().loss_mask(sample)
        return super().loss_mask(
            replace(sample, loss_mask=np.where(np.isnan(sample.logprobs), 1, sample.loss_mask))
        )


class _BatchPromptTrained(Collator):
    """Begins the mask at the last prompt token: labels and tokens are confused."""

    def loss_mask(self, sample: Rollout) -> IntArray:
        mask = super().loss_mask(sample)
        mask[self.left - 1] = 1
        return mask


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="batch-fails-on-empty",
        summary=("A sample without response tokens makes the conversion of the whole batch raise."),
        refs=("verl#6675", "verl#5860"),
        kind="batches",
        make=_BatchFailsOnEmpty,
        detected_by=("batch.accepts",),
    ),
    KnownBug(
        id="batch-writes-read-only",
        summary=(
            "The conversion writes into the samples' arrays, and read-only ones make it raise."
        ),
        refs=("verl#5519",),
        kind="batches",
        make=_BatchWritesReadOnly,
        detected_by=("batch.accepts",),
    ),
    KnownBug(
        id="batch-pads-in-place",
        summary="The conversion changes the samples that it was given.",
        refs=("verl#5519",),
        kind="batches",
        make=_BatchPadsInPlace,
        detected_by=("batch.input",),
    ),
    KnownBug(
        id="batch-drops-remainder",
        summary="Samples that do not fill a microbatch are left out.",
        refs=("AReno#524",),
        kind="batches",
        make=_BatchDropsRemainder,
        detected_by=("batch.complete",),
    ),
    KnownBug(
        id="batch-drops-untrained",
        summary="Samples of which no token is trained are left out, among them overlong ones.",
        refs=("cf. verl#6675",),
        kind="batches",
        make=_BatchDropsUntrained,
        detected_by=("batch.complete",),
    ),
    KnownBug(
        id="batch-filled-with-copies",
        summary=("A batch is filled up with copies of its first sample, which count as samples."),
        refs=("slime#2124",),
        kind="batches",
        make=_BatchFilledWithCopies,
        detected_by=("batch.complete",),
    ),
    KnownBug(
        id="batch-cut-to-width",
        summary="Samples that are longer than a line are cut, and nobody is told.",
        refs=("cf. SkyRL#406",),
        kind="batches",
        make=_BatchCutToWidth,
        detected_by=("batch.tokens",),
    ),
    KnownBug(
        id="batch-wrong-prefix",
        summary=(
            "Tokens are placed by a prompt length that is off by one; the attention mask is not."
        ),
        refs=("AReno#524",),
        kind="batches",
        make=_BatchWrongPrefix,
        detected_by=("batch.tokens",),
    ),
    KnownBug(
        id="batch-mask-padded-with-ones",
        summary="The loss mask is padded with ones.",
        refs=("verl#3805", "rllm#508"),
        kind="batches",
        make=_BatchMaskPaddedWithOnes,
        detected_by=("batch.padding",),
    ),
    KnownBug(
        id="batch-attention-as-loss-mask",
        summary="The attention mask is used as the loss mask: tool output is trained on.",
        refs=("verl#2543",),
        kind="batches",
        make=_BatchAttentionAsLossMask,
        detected_by=("batch.loss-mask",),
    ),
    KnownBug(
        id="batch-mask-by-padding-token",
        summary=(
            "Tokens that equal the padding token have loss mask 0: where it is the end of sequence"
            " too, no end is trained."
        ),
        refs=("Megatron-Bridge#4660", "TRL#6357"),
        kind="batches",
        make=_BatchMaskByPaddingToken,
        detected_by=("batch.loss-mask",),
    ),
    KnownBug(
        id="batch-length-by-padding-token",
        summary=(
            "Attention is 1 at tokens that differ from the padding token: where it is the end of"
            " sequence too, ends are lost."
        ),
        refs=("rllm#517", "TRL#4970"),
        kind="batches",
        make=_BatchLengthByPaddingToken,
        detected_by=("batch.tokens",),
    ),
    KnownBug(
        id="batch-logprobs-shifted",
        summary="Logprobs are one place before their tokens.",
        refs=("SkyRL#1304", "prime-rl#1525"),
        kind="batches",
        make=_BatchLogprobsShifted,
        detected_by=("batch.logprobs",),
    ),
    KnownBug(
        id="batch-logprobs-in-bfloat16",
        summary="Logprobs are rounded to bfloat16.",
        refs=("slime#245",),
        kind="batches",
        make=_BatchLogprobsInBfloat16,
        detected_by=("batch.logprobs",),
    ),
    KnownBug(
        id="batch-logprobs-clipped",
        summary="Logprobs below -20 become -20, which changes the importance ratio of rare tokens.",
        refs=("cf. slime#245",),
        kind="batches",
        make=_BatchLogprobsClipped,
        detected_by=("batch.logprobs",),
    ),
    KnownBug(
        id="batch-logprobs-dropped",
        summary="The batch has no logprobs.",
        refs=("slime#1995", "SkyRL#1815"),
        kind="batches",
        make=_BatchLogprobsDropped,
        detected_by=("batch.logprobs",),
    ),
    KnownBug(
        id="batch-routes-not-shifted",
        summary="Tokens are padded on the left, their routes on the right.",
        refs=("slime#1052", "slime#2175"),
        kind="batches",
        make=_BatchRoutesNotShifted,
        detected_by=("batch.routes",),
    ),
    KnownBug(
        id="batch-ids-in-eight-bits",
        summary="Expert ids are cast to eight bits.",
        refs=("verl#5240",),
        kind="batches",
        make=_BatchIdsInEightBits,
        detected_by=("batch.expert-ids",),
    ),
    KnownBug(
        id="batch-zero-filled",
        summary="Places without a row contain zeros: expert 0, top_k times.",
        refs=("verl agent_loop.py (0.9.1)", "slime#941", "verl#7841"),
        kind="batches",
        make=_BatchZeroFilled,
        detected_by=("batch.filler",),
        may_fail=("batch.mixed",),
    ),
    KnownBug(
        id="batch-first-sample-decides",
        summary="Whether the batch has routes is decided by its first sample.",
        refs=("verl agent_loop.py (0.9.1)",),
        kind="batches",
        make=_BatchFirstSampleDecides,
        detected_by=("batch.mixed",),
    ),
    KnownBug(
        id="batch-one-clears-all",
        summary="A sample without routes makes filler of the routes of all others.",
        refs=("cf. verl agent_loop.py (0.9.1)",),
        kind="batches",
        make=_BatchOneClearsAll,
        detected_by=("batch.mixed",),
    ),
    KnownBug(
        id="batch-takes-anything",
        summary="Fields with lengths that do not fit the tokens are padded silently.",
        refs=("verl agent_loop.py (0.9.1)", "ROLL functionals.py", "verl#6027", "vime#70"),
        kind="batches",
        make=_BatchTakesAnything,
        detected_by=("batch.refuses",),
    ),
    KnownBug(
        id="batch-aligned-with-end",
        summary=("Logprobs and masks that are too short are aligned with the end of the response."),
        refs=("SkyRL preprocess.py (0.3.0, 0.4.0)",),
        kind="batches",
        make=_BatchAlignedWithEnd,
        detected_by=("batch.refuses",),
    ),
    KnownBug(
        id="batch-missing-routes-made-up",
        summary=(
            "A sample without routes gets expert 0, top_k times, in every row, marked as captured."
        ),
        refs=("SkyRL preprocess.py (0.3.0)", "cf. SkyRL#1908"),
        kind="batches",
        make=_BatchMissingRoutesMadeUp,
        detected_by=("batch.mixed",),
    ),
    KnownBug(
        id="batch-merge-loses-routes",
        summary=("The shards of two ranks are merged, and the routes of the second are lost."),
        refs=("AReno#524",),
        kind="batches",
        make=_BatchMergeLosesRoutes,
        detected_by=("batch.mixed",),
        may_fail=("batch.routes",),
    ),
    KnownBug(
        id="batch-logprobs-balanced-apart",
        summary=(
            "Samples are balanced over the ranks by length, and their logprobs stay in the "
            "old order."
        ),
        refs=("cf. slime utils/data.py (local_raw_reward)",),
        kind="batches",
        make=_BatchLogprobsBalancedApart,
        detected_by=("batch.logprobs",),
    ),
    KnownBug(
        id="batch-routes-balanced-apart",
        summary=(
            "Samples are balanced over the ranks by length, and their routes stay in the old order."
        ),
        refs=("cf. AReno#524", "cf. miles#496"),
        kind="batches",
        make=_BatchRoutesBalancedApart,
        detected_by=("batch.routes",),
    ),
    KnownBug(
        id="batch-filter-hits-neighbour",
        summary="A filter zeroes the loss mask of the sample next to the intended one.",
        refs=("cf. slime#2124", "cf. SkyRL generators/utils.py (apply_overlong_filtering)"),
        kind="batches",
        make=_BatchFilterHitsNeighbour,
        detected_by=("batch.loss-mask",),
    ),
    KnownBug(
        id="batch-zigzag-not-undone",
        summary=(
            "Rows that were divided in zigzag over context ranks are joined one rank after the"
            " other."
        ),
        refs=("slime#2175",),
        kind="batches",
        make=_BatchZigzagNotUndone,
        detected_by=("batch.routes",),
    ),
    KnownBug(
        id="batch-missing-logprob-trained",
        summary="A missing logprob becomes 0.0, a probability of 1, and its token is trained on.",
        refs=("OpenRLHF agent.py (0.11.2)", "vime#70"),
        kind="batches",
        make=_BatchMissingLogprobTrained,
        detected_by=("batch.loss-mask",),
        may_fail=("batch.logprobs",),
    ),
    KnownBug(
        id="batch-prompt-trained",
        summary="The loss mask begins one token early, on the last token of the prompt.",
        refs=("cf. verl#3805",),
        kind="batches",
        make=_BatchPromptTrained,
        detected_by=("batch.loss-mask",),
    ),
)
