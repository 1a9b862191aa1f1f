"""Correct layout functions, written row by row, independent of the reference that judges them.

``rollproof.layouts`` computes index arrays and composes them; this module walks over tokens and
places each one. Known bugs override its methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rollproof.core.contract import LayerAxis, Provenance, Rows
from rollproof.core.records import IntArray, Version
from rollproof.layouts.layout import Layout
from rollproof.layouts.merged_rows import Segment
from rollproof.layouts.mesh import Mesh, Rank
from rollproof.layouts.padding import Alignment, Fill, Side
from rollproof.layouts.pipeline import Operation
from rollproof.layouts.row_slices import Context, Order

__all__ = ["Layer", "MegatronLike", "Pair", "Pass"]

Layer = int
Pair = tuple[IntArray, IntArray]
Pass = tuple[int, int]


class MegatronLike:
    """A ``LayoutSubject`` with every layout function, in Megatron's conventions: packed, zigzag,
    sequence parallel, sequence-major.
    """

    layout: ClassVar[Layout] = Layout(
        num_layers=4,
        num_experts=64,
        top_k=2,
        mesh=Mesh(tp=2, sequence_parallel=True),
        alignment=Alignment(by=("tp", "2cp")),
    )

    # Tokens

    def complete(self, layout: Layout, routes: IntArray, tokens: int) -> IntArray:
        """Return the captured rows, followed by filler."""
        minimum = {Rows.ALL: tokens, Rows.FORWARDED: tokens - 1}.get(layout.held, 0)
        if not minimum <= len(routes) <= tokens:
            raise ValueError(f"{len(routes)} rows for {tokens} tokens")
        return np.concatenate([routes, self.filler(layout, tokens - len(routes), routes.shape[1:])])

    def filler(self, layout: Layout, rows: int, shape: tuple[int, ...]) -> IntArray:
        """Return ``(rows, *shape)``: k distinct experts a row, or the declared fill."""
        out = np.zeros((rows, *shape), dtype=np.int64)
        if layout.fill is Fill.SENTINEL:
            out -= 1
        elif layout.fill is Fill.ARANGE:
            out += np.arange(shape[-1])
        elif layout.fill is Fill.SPREAD:
            out = np.arange(out.size).reshape(out.shape) % layout.num_experts
        return out

    def pair(self, layout: Layout, tokens: IntArray, routes: IntArray) -> Pair:
        """Return the tokens that the model gets (all), and one row for each."""
        return tokens, np.concatenate(
            [routes, self.filler(layout, len(tokens) - len(routes), routes.shape[1:])]
        )

    def pad(self, layout: Layout, samples: Sequence[IntArray], prompts: Sequence[int]) -> Pair:
        """Return one line a sample, and the attention mask."""
        left = max(prompts)
        width = self.width(layout, samples, prompts)
        batch = np.zeros((len(samples), width, *samples[0].shape[1:]), dtype=samples[0].dtype)
        attention = np.zeros((len(samples), width), dtype=np.int64)
        for i, sample in enumerate(samples):
            start = {Side.LEFT: width - len(sample), Side.RIGHT: 0, Side.BOTH: left - prompts[i]}[
                layout.side
            ]
            for position, row in enumerate(sample):
                batch[i, start + position] = row
                attention[i, start + position] = 1
        return batch, attention

    def width(self, layout: Layout, samples: Sequence[IntArray], prompts: Sequence[int]) -> int:
        """Return the places of a line: enough for the longest sample, or for the longest prompt and
        the longest response.
        """
        longest = max(len(sample) for sample in samples)
        if layout.side is Side.BOTH:
            longest = max(prompts) + max(
                len(sample) - prompt for sample, prompt in zip(samples, prompts, strict=True)
            )
        return longest + -longest % layout.alignment.multiple(layout.mesh)

    def unpad(self, layout: Layout, batch: IntArray, attention: IntArray) -> list[IntArray]:
        """Return the attended rows of each line."""
        return [
            np.array([row for row, attended in zip(line, mask, strict=True) if attended])
            for line, mask in zip(batch, attention, strict=True)
        ]

    def padded_lengths(self, layout: Layout, lengths: Sequence[int]) -> list[int]:
        """Return each length rounded up; the last one takes the padding of the sum."""
        multiple, total = (
            layout.alignment.multiple(layout.mesh),
            layout.alignment.total_multiple(layout.mesh),
        )
        out = [length + -length % multiple for length in lengths]
        out[-1] += -sum(out) % total
        return out

    def lines(self, layout: Layout, samples: Sequence[IntArray]) -> list[IntArray]:
        """Return each sample, followed by its padding."""
        room = self.padded_lengths(layout, [len(sample) for sample in samples])
        return [
            np.concatenate([s, self.filler(layout, n - len(s), s.shape[1:])])
            for s, n in zip(samples, room, strict=True)
        ]

    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        """Return all lines, one after the other, and where each begins."""
        lines = self.lines(layout, samples)
        return np.concatenate(lines), np.cumsum([0, *(len(line) for line in lines)])

    def unpack(self, layout: Layout, rows: IntArray, lengths: Sequence[int]) -> list[IntArray]:
        """Return the rows of each sample, without padding."""
        out, start = [], 0
        for length, room in zip(lengths, self.padded_lengths(layout, lengths), strict=True):
            out.append(rows[start : start + length])
            start += room
        return out

    # Ranks

    def owner(self, layout: Layout, place: int, room: int, start: int, total: int) -> int:
        """Return the context-parallel rank of a place in a line.

        The line has ``room`` rows and begins at row ``start`` of ``total`` rows.
        """
        size = layout.mesh.cp
        if layout.context is Context.CONTIGUOUS:
            return (start + place) // (total // size)
        if layout.context is Context.EACH_CONTIGUOUS or size == 1:
            return place // (room // size) if room else 0
        # zigzag: rank r has chunks r and 2 * cp - 1 - r, so that causal attention is balanced
        chunk = place // (room // (2 * size))
        return min(chunk, 2 * size - 1 - chunk)

    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        """Return the rows that belong to the rank, in packed order."""
        lines = self.lines(layout, samples)
        total, start, out = sum(len(line) for line in lines), 0, [lines[0][:0]]
        for line in lines:
            out += [
                row[None]
                for i, row in enumerate(line)
                if self.owner(layout, i, len(line), start, total) == rank.cp
            ]
            start += len(line)
        return np.concatenate(out)

    def context_merge(
        self, layout: Layout, pieces: Sequence[IntArray], lengths: Sequence[int]
    ) -> list[IntArray]:
        """Fill each place of each sample from the next unread row of its owner."""
        rooms, out, start = self.padded_lengths(layout, lengths), [], 0
        read = [iter(piece) for piece in pieces]
        for length, room in zip(lengths, rooms, strict=True):
            line = [next(read[self.owner(layout, i, room, start, sum(rooms))]) for i in range(room)]
            out.append(np.array(line[:length]))
            start += room
        return out

    def tensor_slice(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        """Return the rank's piece of the rows."""
        return np.split(rows, layout.mesh.tp)[rank.tp]

    def ulysses(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        """Return the rank's piece of the rows, padded to divide evenly."""
        size = layout.mesh.ulysses
        more = self.filler(layout, -len(rows) % size, rows.shape[1:])
        return np.split(np.concatenate([rows, more]), size)[rank.ulysses]

    def flatten(self, layout: Layout, batch: IntArray) -> IntArray:
        """Return router rows in the model's order."""
        samples, width = batch.shape[:2]
        # Megatron puts the sequence before the batch in its activations
        if layout.order is Order.BATCH_MAJOR:
            return np.array([batch[b, s] for b in range(samples) for s in range(width)])
        return np.array([batch[b, s] for s in range(width) for b in range(samples)])

    # Layers

    def column(self, layout: Layout, layer: Layer) -> int:
        """Return the payload's column of a MoE layer."""
        return (
            layer if layout.layer_axis is LayerAxis.ALL else sum(moe < layer for moe in layout.moe)
        )

    def stage_layers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        """Return the layers of a chunk."""
        return self.built(layout, rank, chunk)

    def routers(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        """Return the MoE layers of a chunk."""
        return self.routed(layout, rank, chunk)

    def built(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        """Return the layers of a chunk; they are dealt out chunk by chunk, rank by rank."""
        counts, layer = layout.stages.counts(layout.num_layers, layout.mesh.pp, layout.mesh.vpp), 0
        for v in range(layout.mesh.vpp):
            for pp in range(layout.mesh.pp):
                if (pp, v) == (rank.pp, chunk):
                    return list(range(layer, layer + counts[pp][v]))
                layer += counts[pp][v]
        raise ValueError(f"there is no chunk {chunk} on {rank}")

    def routed(self, layout: Layout, rank: Rank, chunk: int) -> list[Layer]:
        """Return the MoE layers among ``built``."""
        return [layer for layer in self.built(layout, rank, chunk) if layer in layout.moe]

    def select(
        self, layout: Layout, rows: IntArray, rank: Rank, chunk: int
    ) -> dict[Layer, IntArray]:
        """Return the column of each router."""
        return {
            layer: rows[:, self.column(layout, layer)] for layer in self.routed(layout, rank, chunk)
        }

    def passes(self, layout: Layout, microbatches: int) -> list[Pass]:
        """Return the forward passes: groups of microbatches, each through all chunks."""
        out, size = [], layout.group or layout.mesh.pp
        for start in range(0, microbatches, size):
            group = range(start, min(start + size, microbatches))
            for chunk in range(layout.mesh.vpp):
                out += [(microbatch, chunk) for microbatch in group]
        return out

    def serve(
        self, layout: Layout, operations: Sequence[Operation], recompute: bool
    ) -> tuple[list[Pass], int]:
        """Return the targets in the order of their use, and how many are left in the chunks'
        queues.
        """
        queues: dict[int, list[Pass]] = {chunk: [] for chunk in range(layout.mesh.vpp)}
        used = []
        for operation in operations:
            if not operation.backward:
                queues[operation.chunk].append((operation.microbatch, operation.chunk))
                used.append((operation.microbatch, operation.chunk))
            elif recompute:
                used.append(queues[operation.chunk].pop(0))
        return used, sum(len(queue) for queue in queues.values()) if recompute else 0

    def reorder(
        self, layout: Layout, recorded: Sequence[IntArray], microbatches: int, rank: Rank
    ) -> list[IntArray]:
        """Return the chunks of each microbatch, next to each other."""
        parts: dict[Pass, IntArray] = dict(
            zip(self.passes(layout, microbatches), recorded, strict=True)
        )
        return [
            np.concatenate([parts[m, v] for v in range(layout.mesh.vpp)], axis=1)
            for m in range(microbatches)
        ]

    def gather_stages(self, layout: Layout, stages: Sequence[IntArray]) -> IntArray:
        """Return all layers, each from the rank that has it."""
        owned = [
            [
                layer
                for chunk in range(layout.mesh.vpp)
                for layer in self.routed(layout, Rank(pp=pp), chunk)
            ]
            for pp in range(layout.mesh.pp)
        ]
        columns = []
        for layer in layout.moe:
            pp = next(pp for pp, layers in enumerate(owned) if layer in layers)
            columns.append(stages[pp][:, owned[pp].index(layer)])
        return np.stack(columns, axis=1)

    def merge(self, layout: Layout, recorded: Any, lengths: Sequence[int]) -> list[IntArray]:
        """Join tensor-parallel pieces, then context-parallel ranks, layer by layer."""
        mesh = layout.mesh
        out: list[IntArray] = []
        for layer in layout.moe:
            pp, chunk = self.stage(layout, layer)
            # without sequence parallelism all tensor ranks have the same rows
            tensor = range(mesh.tp) if mesh.sequence_parallel else range(1)
            pieces = [
                np.concatenate([recorded[Rank(pp=pp, cp=cp, tp=tp), chunk][layer] for tp in tensor])
                for cp in range(mesh.cp)
            ]
            samples = self.context_merge(layout, pieces, lengths)
            out = out or [
                np.zeros((len(s), layout.columns, s.shape[-1]), dtype=np.int64) for s in samples
            ]
            for merged, rows in zip(out, samples, strict=True):
                merged[:, self.column(layout, layer)] = rows
        return out

    def stage(self, layout: Layout, layer: Layer) -> tuple[int, int]:
        """Return the pipeline rank and the chunk of a layer."""
        places = [(pp, v) for pp in range(layout.mesh.pp) for v in range(layout.mesh.vpp)]
        return next((pp, v) for pp, v in places if layer in self.built(layout, Rank(pp=pp), v))

    def targets(
        self,
        layout: Layout,
        payloads: Sequence[IntArray],
        lengths: Sequence[int],
        rank: Rank,
        chunk: int,
    ) -> dict[Layer, IntArray]:
        """Return each router's target: final rows, packing, context and tensor slices, layers."""
        complete = [
            self.complete(layout, payload, length)
            for payload, length in zip(payloads, lengths, strict=True)
        ]
        rows = self.context(layout, complete, rank)
        if layout.mesh.sequence_parallel:
            rows = self.tensor_slice(layout, rows, rank)
        return self.select(layout, rows, rank, chunk)

    # Samples

    def microbatches(self, layout: Layout, lengths: Sequence[int], most: int) -> list[list[int]]:
        """Return the samples of each microbatch, filled in order."""
        out: list[list[int]] = [[]]
        for i, length in enumerate(lengths):
            # a sample that is too long is alone, and leaves no empty microbatch in front of it
            if out[-1] and sum(lengths[j] for j in out[-1]) + length > most:
                out.append([])
            out[-1].append(i)
        return out

    def restore(
        self, layout: Layout, values: Sequence[Sequence[IntArray]], indexes: Sequence[Sequence[int]]
    ) -> list[IntArray]:
        """Return the values in the order of the samples."""
        placed = {
            i: value
            for part, order in zip(values, indexes, strict=True)
            for value, i in zip(part, order, strict=True)
        }
        return [placed[i] for i in range(len(placed))]

    def divide(self, layout: Layout, samples: Sequence[Pair], parts: int) -> list[list[Pair]]:
        """Give the longest sample first, each to the part with the fewest tokens."""
        out: list[list[Pair]] = [[] for _ in range(parts)]
        for sample in sorted(samples, key=lambda pair: -len(pair[0])):
            min(out, key=lambda part: sum(len(tokens) for tokens, _ in part)).append(sample)
        return out

    def keep(self, layout: Layout, samples: Sequence[Pair], kept: Sequence[int]) -> list[Pair]:
        """Return the samples with the indexes ``kept``."""
        return [samples[i] for i in kept]

    def compact(self, layout: Layout, ids: IntArray) -> IntArray:
        """Return uint8 for up to 256 experts, int16 beyond."""
        return ids.astype(np.uint8 if layout.num_experts <= 256 else np.int16)

    def fill(self, layout: Layout, rows: int) -> IntArray:
        """Return padding rows."""
        return self.filler(layout, rows, (layout.columns, layout.top_k))

    def join(self, layout: Layout, segments: Sequence[Segment]) -> tuple[IntArray, list[Version]]:
        """Return each position from the first call that returned it, or from the last one."""
        rows: dict[int, IntArray] = {}
        versions: dict[int, Version] = {}
        for segment in segments:
            for i, row in enumerate(segment.routes, segment.start):
                if i not in rows or layout.provenance is Provenance.LATEST_PREFILL:
                    rows[i], versions[i] = row, segment.version
        return np.array([rows[i] for i in sorted(rows)]), [versions[i] for i in sorted(rows)]
