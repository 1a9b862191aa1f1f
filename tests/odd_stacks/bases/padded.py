"""Padded: prompts to the left of a line, responses to the right of it, padding on both ends (as verl's DataProto has it)."""

from __future__ import annotations

import numpy as np

import rollproof
from rollproof.records import BatchRow

PAD, LAYERS, EXPERTS, K = 2, 3, 200, 2


def form(**changes):
    return rollproof.Contract(
        **{
            "rows": "T-1",
            "resume": "client",
            "versions": "none",
            "logprobs": "raw",
            "missing_logprobs": "masked",
            "loss_mask": True,
            "abort_surfaces": True,
            "kv_policy": "recompute",
            "layer_axis": "all",
            "num_layers": LAYERS,
            "moe_layers": tuple(range(LAYERS)),
            "num_experts": EXPERTS,
            "top_k": K,
            "filler": "minus-one",
            "dtype": "int16",
            "provenance": "as-sampled",
            "pad_id": PAD,
            **changes,
        }
    )


class Padded:
    contract = form()

    def refuse(self, s):
        n = len(s.response_ids)
        sizes = {
            "logprobs": (s.logprobs, n),
            "loss_mask": (s.loss_mask, n),
            "routes": (s.routes, len(s.prompt_ids) + n - 1),
        }
        for name, (value, want) in sizes.items():
            if value is not None and len(value) != want:
                raise ValueError(f"{name} of {s.request_id}: {len(value)} in place of {want}")

    def collate(self, samples):
        for s in samples:
            if s.response_ids:
                self.refuse(s)
        samples = self.choose(samples)
        P = max((len(s.prompt_ids) for s in samples), default=0)
        R = max((len(s.response_ids) for s in samples), default=0)
        shape = (len(samples), P + R)
        b = {
            "ids": [s.request_id for s in samples],
            "P": P,
            "tokens": np.full(shape, PAD),
            "attention": np.zeros(shape, int),
            "mask": np.zeros(shape, int),
            "logprobs": np.full(shape, np.nan),
            "routes": np.full((*shape, LAYERS, K), -1, np.int16),
            "routed": np.zeros(shape, int),
        }
        for i, s in enumerate(samples):
            self.fill(b, i, s, P)
        return b

    def choose(self, samples):
        return samples

    def fill(self, b, i, s, P):
        p, n = len(s.prompt_ids), len(s.response_ids)
        b["tokens"][i, P - p : P] = s.prompt_ids
        b["tokens"][i, P : P + n] = s.response_ids
        b["attention"][i, P - p : P + n] = self.attention(b, i, P - p, P + n)
        b["mask"][i, P : P + n] = self.mask(s)
        if s.logprobs is not None:
            b["logprobs"][i, P : P + n] = s.logprobs
        if s.routes is not None and n:
            self.fill_routes(b, i, s, P - p)

    def attention(self, b, i, start, end):
        return 1

    def mask(self, s):
        return np.ones(len(s.response_ids), int) if s.loss_mask is None else s.loss_mask

    def fill_routes(self, b, i, s, start):
        b["routes"][i, start : start + len(s.routes)] = s.routes
        b["routed"][i, start : start + len(s.routes)] = 1

    def rows(self, b):
        return [
            BatchRow(
                request_id=name,
                token_ids=b["tokens"][i],
                attention=b["attention"][i],
                loss_mask=b["mask"][i],
                logprobs=b["logprobs"][i],
                routes=b["routes"][i],
                routed=b["routed"][i],
            )
            for i, name in enumerate(b["ids"])
        ]


class Uniform(Padded):
    """Refuses a batch in which some samples have routes and others, also empty ones, have none."""

    def collate(self, samples):
        if len({s.routes is None for s in samples}) > 1:
            raise ValueError("all samples have routes, or none")
        return super().collate(samples)
