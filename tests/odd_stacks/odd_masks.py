"""Samples with sampling masks that are unusual and keep their contracts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollproof import SamplingMask
from tests.odd_stacks.bases.column_batches import Unpadded
from tests.odd_stacks.bases.padded import form
from tests.odd_stacks.bases.thin import Thin, promise


class MasksWhereTopP(Thin):
    """The stack's own parameters: every second prompt is sampled with top_p, and its masks are
    requested and appended as ids and offsets, largest id first; the others are sampled among all
    tokens, and request none.
    """

    contract = promise(sampling="own", sampling_masks=True)

    def cuts(self, run):
        return sum(run.request.prompt_ids) % 2 == 0

    def params(self, run):
        return {"temperature": 1.0, **({"top_p": 0.95, "top_k": 64} if self.cuts(run) else {})}

    def wants(self, run):
        return {**super().wants(run), "return_sampling_mask": self.cuts(run)}

    def take(self, run, sent, out):
        if not hasattr(run, "kept"):
            run.kept, run.offsets = [], [0]
        for i in range(len(out.token_ids)):
            mask = out.sampling_mask
            run.kept += [] if mask is None else reversed(mask.ids_of(i))
            run.offsets.append(len(run.kept))
        super().take(run, sent, out)

    def tags(self, run):
        return {
            **super().tags(run),
            "sampling_mask": SamplingMask.from_offsets(run.kept, run.offsets),
        }


class GreedyMasks(Thin):
    """Samples greedily, whatever the caller says: masks are the tokens themselves, in 32 bits, and
    no engine is requested to return them.
    """

    contract = promise(sampling="own", sampling_masks=True)

    def params(self, run):
        return {"temperature": 0.0, "top_p": 0.9}

    def tags(self, run):
        ones = np.ones(len(run.ids), np.int32)
        ids = np.array(run.ids, np.int32)
        return {**super().tags(run), "sampling_mask": SamplingMask(counts=ones, token_ids=ids)}


class MaskedMasks(Unpadded):
    """Tokens that the loss leaves out have no mask in the batch; ids descend."""

    contract = form(columns=Unpadded.contract.columns, sampling_masks=True)

    def collate(self, samples):
        for s in samples:
            if len(s.sampling_mask) != len(s.response_ids):
                raise ValueError(f"masks of {s.request_id}")
        return super().collate(samples)

    def row(self, s):
        lists = [
            s.sampling_mask.ids_of(i)[::-1] if trained else ()
            for i, trained in enumerate(s.loss_mask)
        ]
        prompt = [()] * len(s.prompt_ids)
        return replace(super().row(s), sampling_mask=SamplingMask.from_lists([*prompt, *lists]))
