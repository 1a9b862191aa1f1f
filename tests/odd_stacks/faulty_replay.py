"""Trainers with one fault of routing replay each."""

from __future__ import annotations

import numpy as np
import torch

from tests.odd_stacks.bases.packed_trainer import EXPERTS, Book, Gate, K, PackedTrainer


class QueuePoppedAgainQueue(Book):
    def lookup(self, microbatch, layer):
        line = self.pages.get(layer)
        return line.pop(0) if line else None

    def write(self, microbatch, layer, target):
        if target is not None:
            self.pages.setdefault(layer, []).append(target)


class QueuePoppedAgainFitting(Gate):
    def choose(self, native, target):
        if target is not None and len(target) != len(native):
            target = torch.cat([target, target.new_full((len(native), 2), -1)])[: len(native)]
        return super().choose(native, target)


class QueuePoppedAgain(PackedTrainer):
    """Targets wait in one queue a layer for all microbatches; a recompute pops once more, and gets
    the target of a later microbatch, or none.
    """

    book_class, gate_class = QueuePoppedAgainQueue, QueuePoppedAgainFitting


class MinusOneIsExpertZeroClamping(Gate):
    def choose(self, native, target):
        return native if target is None else target.clamp(min=0)


class MinusOneIsExpertZero(PackedTrainer):
    """The -1 of a free row is clamped to 0: the row executes expert 0 twice in place of the router's
    own choice.
    """

    gate_class = MinusOneIsExpertZeroClamping


class WeightsOfTheNativeChoiceNative(Gate):
    def weigh(self, score, chosen, native):
        w = torch.gather(score, 1, native)
        return w / w.sum(1, keepdim=True)


class WeightsOfTheNativeChoice(PackedTrainer):
    """The replayed experts are mixed with the weights that the router gave to its own choice."""

    gate_class = WeightsOfTheNativeChoiceNative


class TargetsCachedByRequest(PackedTrainer):
    """Targets are cached by request id between steps: routes that were recorded anew for the same
    request are never used.
    """

    def payload(self, s):
        if not hasattr(self, "cache"):
            self.cache = {}
        kept = self.cache.setdefault(s.request_id, s.routes)
        return kept if len(kept) == len(s.routes) else s.routes


class IdsClamped(PackedTrainer):
    """Expert ids beyond the model's are clamped to the last expert in place of being refused."""

    def valid(self, s):
        r = s.routes
        if (
            r is None
            or r.dtype.kind not in "iu"
            or r.ndim != 3
            or r.shape[1:] != (2, 2)
            or len(r) != s.total - 1
            or r.min(initial=0) < 0
        ):
            raise ValueError("bad routes")
        if any(len(set(c)) < 2 for c in r.reshape(-1, 2).tolist()):
            raise ValueError("bad routes")

    def payload(self, s):
        return np.minimum(s.routes, EXPERTS - 1)


class ResponsesOnly(PackedTrainer):
    """Only the rows of the response are replayed, those of the prompt are left to the router ("no
    loss on the prompt"), though they have targets.
    """

    def payload(self, s):
        rows = s.routes.astype(np.int64)
        rows[: len(s.prompt_ids) - 1] = -1
        return rows


class OffsetsOfPayloadRows(PackedTrainer):
    """In the packed line each payload begins where the one before ends; payloads have T-1 rows and
    sequences T, so each sample is one row further ahead.
    """

    def target(self, samples, layer):
        if not samples:
            return None
        rows = np.concatenate([s.routes[:, layer].astype(np.int64) for s in samples])
        return torch.from_numpy(np.concatenate([rows, np.full((len(samples), K), -1)]))
