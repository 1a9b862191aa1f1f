"""Batches and layouts with one fault each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.odd_stacks.bases.indexed import Indexed
from tests.odd_stacks.bases.padded import PAD, Padded


class AttentionFromPadId(Padded):
    """The attention mask is tokens != pad_id; the pad token is one that samples contain (the
    contract's pad_id), so tokens of a sample are not attended.
    """

    def attention(self, b, i, start, end):
        return (b["tokens"][i, start:end] != PAD).astype(int)


class MaskFromPadId(Padded):
    """The loss mask is multiplied by tokens != pad_id: an end of sequence that pads is never
    trained.
    """

    def mask(self, s):
        return super().mask(s) * (np.array(s.response_ids, int) != PAD)


class MaskFromTheRight(Padded):
    """The loss mask is laid into the last places of the line, as if responses were padded on the
    left.
    """

    def fill(self, b, i, s, P):
        super().fill(b, i, s, P)
        n, width = len(s.response_ids), b["mask"].shape[1]
        line = np.zeros(width, int)
        if n:
            line[width - n :] = self.mask(s)
        b["mask"][i] = line


class LogprobsClamped(Padded):
    """Logprobs are clamped at -10 when the batch is made."""

    def collate(self, samples):
        b = super().collate(samples)
        b["logprobs"] = np.maximum(b["logprobs"], -10.0)
        return b


class ZippedToTheShortest(Padded):
    """Tokens, masks and logprobs of a response are zipped: a mask that is too short silently cuts
    the others.
    """

    def refuse(self, s):
        pass

    def fill(self, b, i, s, P):
        p = len(s.prompt_ids)
        b["tokens"][i, P - p : P] = s.prompt_ids
        b["attention"][i, P - p : P] = 1
        lps = [np.nan] * len(s.response_ids) if s.logprobs is None else s.logprobs
        for at, (token, m, lp) in enumerate(
            zip(s.response_ids, self.mask(s), lps, strict=False), P
        ):
            b["tokens"][i, at], b["mask"][i, at], b["logprobs"][i, at], b["attention"][i, at] = (
                token,
                m,
                lp,
                1,
            )
        if s.routes is not None and len(s.response_ids):
            rows = s.routes[: b["routes"].shape[1] - (P - p)]
            b["routes"][i, P - p : P - p + len(rows)] = rows
            b["routed"][i, P - p : P - p + len(rows)] = 1


class SurplusRowsSpill(Padded):
    """Rows are never counted: those beyond the tokens of a sample stand in its padding."""

    def refuse(self, s):
        if s.routes is None or len(s.routes) < s.total - 1:
            super().refuse(s)


class ZigzagBackPieceFirst(Indexed):
    """A context-parallel rank gets its two pieces in the wrong order: the back one first."""

    def division(self, line, size, cp):
        if size == 1:
            return line
        h = len(line) // (2 * size)
        return line[(2 * size - cp - 1) * h : (2 * size - cp) * h] + line[cp * h : (cp + 1) * h]


class PaddingInFront(Indexed):
    """The padding of each packed sequence stands before it; token ids are padded behind."""

    def places(self, layout, lengths):
        out = []
        for i, n in enumerate(lengths):
            out += [(i, -1)] * (self.room(layout, n) - n) + [(i, p) for p in range(n)]
        return out


class MergeKeepsPadding(Indexed):
    """The merged rows are divided by the padded lengths: the padding of one sample comes back as
    rows of it.
    """

    def context_merge(self, layout, pieces, lengths):
        return super().context_merge(layout, pieces, [self.room(layout, n) for n in lengths])


class ColumnMinusFirst(Indexed):
    """The column of a layer is its index minus that of the first sparse layer, right for a model
    with dense layers in front and a MoE axis only; here the axis has all layers.
    """

    def column(self, layout, layer):
        return layer - min(layout.moe)


class MicrobatchOverfull(Indexed):
    """A microbatch is closed once it is over the limit, so that it holds one sample too many."""

    def microbatches(self, layout, lengths, most):
        out, now = [], []
        for i, n in enumerate(lengths):
            now.append(i)
            if sum(lengths[j] for j in now) >= most:
                out.append(now)
                now = []
        return out + ([now] if now else [])


class LongSampleInNoMicrobatch(Indexed):
    """A sample that fits into no microbatch is skipped."""

    def microbatches(self, layout, lengths, most):
        bins = super().microbatches(layout, lengths, most)
        return [b for b in bins if sum(lengths[i] for i in b) <= most]


class IdsInASignedByte(Indexed):
    """Ids of a model with 200 experts are stored in a byte, and the byte is signed."""

    layout = replace(Indexed.layout, num_experts=200)

    def compact(self, layout, ids):
        return ids.astype(np.int8 if layout.num_experts == 200 else np.int16)
