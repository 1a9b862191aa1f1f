"""Indexed: every layout function as an array of source indexes (-1: padding), then one gather. Packed, zigzag, sequence parallel."""

from __future__ import annotations

import math

import numpy as np

from rollproof.layouts import Alignment, Layout, Mesh


class Indexed:
    layout = Layout(
        num_layers=6,
        num_experts=128,
        top_k=3,
        moe_layers=(1, 3, 4, 5),
        layer_axis="all",
        mesh=Mesh(tp=2, cp=2, sequence_parallel=True),
        alignment=Alignment(by=("tp", "2cp")),
    )

    def unit(self, m):
        return m.tp * (2 * m.cp if m.cp > 1 else 1)

    def room(self, layout, n):
        return math.ceil(n / self.unit(layout.mesh)) * self.unit(layout.mesh)

    def places(self, layout, lengths):
        """(sample, position) of each packed place; position -1 in padding."""
        return [
            (i, p if p < n else -1)
            for i, n in enumerate(lengths)
            for p in range(self.room(layout, n))
        ]

    def held(self, layout, lengths, cp):
        size, out = layout.mesh.cp, []
        for i, n in enumerate(lengths):
            line = [(i, p if p < n else -1) for p in range(self.room(layout, n))]
            out += self.division(line, size, cp)
        return out

    def division(self, line, size, cp):
        if size == 1:
            return line
        h = len(line) // (2 * size)
        return line[cp * h : (cp + 1) * h] + line[(2 * size - cp - 1) * h : (2 * size - cp) * h]

    def gather(self, samples, places, k, columns):
        empty = self.padding(k, columns)
        return (
            np.stack([samples[i][p] if 0 <= p < len(samples[i]) else empty for i, p in places])
            if places
            else np.zeros((0, columns, k), int)
        )

    def padding(self, k, columns):
        return np.tile(np.arange(k), (columns, 1))

    def shape(self, layout, samples):
        return samples[0].shape[:0:-1] if len(samples) else (layout.top_k, layout.columns)

    def pack(self, layout, samples):
        return self.gather(
            samples, self.places(layout, [len(s) for s in samples]), *self.shape(layout, samples)
        )

    def context(self, layout, samples, rank):
        return self.gather(
            samples,
            self.held(layout, [len(s) for s in samples], rank.cp),
            *self.shape(layout, samples),
        )

    def context_merge(self, layout, pieces, lengths):
        out = [np.zeros((n, *pieces[0].shape[1:]), pieces[0].dtype) for n in lengths]
        for cp, rows in enumerate(pieces):
            for row, (i, p) in zip(rows, self.held(layout, lengths, cp), strict=False):
                if p >= 0:
                    out[i][p] = row
        return out

    def tensor_slice(self, layout, rows, rank):
        per = len(rows) // layout.mesh.tp
        return rows[per * rank.tp :][:per]

    def select(self, layout, rows, rank, chunk):
        mine = [i for i in layout.chunks()[rank.pp][chunk] if i in layout.moe]
        return {i: rows[:, self.column(layout, i)] for i in mine}

    def column(self, layout, layer):
        return {
            "all": layer,
            "moe": sorted(layout.moe).index(layer) if layer in layout.moe else None,
        }[str(layout.layer_axis.value)]

    def targets(self, layout, payloads, lengths, rank, chunk):
        k, columns = self.shape(layout, payloads)
        rows = self.gather(payloads, self.held(layout, lengths, rank.cp), k, columns)
        if layout.mesh.sequence_parallel:
            rows = self.tensor_slice(layout, rows, rank)
        return self.select(layout, rows, rank, chunk)

    def microbatches(self, layout, lengths, most):
        bins = []  # first fit, longest first
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            for b in bins:
                if sum(lengths[j] for j in b) + lengths[i] <= most:
                    b.append(i)
                    break
            else:
                bins.append([i])
        return bins

    def restore(self, layout, values, indexes):
        pairs = sorted((i, n) for n, i in enumerate(i for part in indexes for i in part))
        flat = [v for part in values for v in part]
        return [flat[n] for _, n in pairs]

    def compact(self, layout, ids):
        return ids.astype(np.uint8 if layout.num_experts <= 256 else np.uint16)
