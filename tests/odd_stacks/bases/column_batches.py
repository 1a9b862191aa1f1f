"""Batches with further columns, in two unusual and correct forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollproof import Column
from rollproof.records import BatchRow
from tests.odd_stacks.bases.padded import Padded, form


class MaskedAndSorted(Padded):
    """Columns are multiplied by the loss mask, as an estimator does; rows are sorted by length, and
    groups numbered anew in that order. Rewards pass through half precision.
    """

    contract = form(
        columns=(
            Column(name="advantages", filler=0.0),
            Column(name="scores", extent="last", filler=0.0, dtype="bfloat16"),
            Column(name="reward", extent="row", dtype="float16"),
            Column(name="uid", extent="group"),
        )
    )

    def refuse(self, s):
        super().refuse(s)
        if len(s.columns["advantages"]) != len(s.response_ids):
            raise ValueError(f"advantages of {s.request_id}")

    def choose(self, samples):
        self.chosen = sorted(samples, key=lambda s: -len(s.prompt_ids + s.response_ids))
        return self.chosen

    def rows(self, b):
        numbers = {}
        for s in self.chosen:
            numbers.setdefault(s.values["uid"], len(numbers))
        return [
            self.with_columns(row, s, b["P"], numbers[s.values["uid"]])
            for row, s in zip(super().rows(b), self.chosen, strict=True)
        ]

    def with_columns(self, row, s, P, number):
        advantages, scores = np.zeros(len(row.token_ids)), np.zeros(len(row.token_ids))
        n = len(s.response_ids)
        advantages[P : P + n] = s.columns["advantages"] * self.mask(s)
        trained = np.flatnonzero(self.mask(s)) if n else ()
        if len(trained):
            # the last token that is trained, and not that of the environment
            scores[P + int(trained[-1])] = s.values["scores"]
        return replace(
            row,
            columns={"advantages": advantages, "scores": scores},
            values={"reward": np.float16(s.values["reward"]), "uid": number},
        )


class Unpadded:
    """Samples without padding, each with columns over prompt and response; what the prompt holds in
    a column of the response is not defined. Logprobs of the reference are NaN before it.
    """

    contract = form(
        columns=(
            Column(name="types", extent="tokens", dtype="uint8"),
            Column(name="reference", filler="nan", dtype="float64"),
            Column(name="returns", extent="trained"),
        )
    )

    def collate(self, samples):
        for s in samples:
            p, n = len(s.prompt_ids), len(s.response_ids)
            lengths = {
                "types": (s.columns["types"], p + n),
                "reference": (s.columns["reference"], n),
                "logprobs": (s.logprobs, n),
                "loss_mask": (s.loss_mask, n),
                "routes": (s.routes, p + n - 1),
            }
            for name, (values, length) in lengths.items():
                if n and values is not None and len(values) != length:
                    raise ValueError(f"{name} of {s.request_id}")
        return list(reversed(samples))

    def rows(self, b):
        return [self.row(s) for s in b]

    def row(self, s):
        p, n = len(s.prompt_ids), len(s.response_ids)
        reference = np.full(p + n, np.nan)
        reference[p:] = s.columns["reference"]
        routes = np.full((p + n, 3, 2), -1, np.int16)
        if s.routes is not None and n:
            routes[: len(s.routes)] = s.routes
        return BatchRow(
            request_id=s.request_id,
            token_ids=[*s.prompt_ids, *s.response_ids],
            attention=np.ones(p + n, int),
            loss_mask=[*[0] * p, *s.loss_mask],
            logprobs=[*[None] * p, *s.logprobs],
            routes=None if s.routes is None else routes,
            columns={
                "types": s.columns["types"].astype(np.uint8),
                "reference": reference,
                # also on the prompt and on tokens of the environment: the loss masks them
                "returns": np.full(p + n, s.values["returns"]),
            },
        )
