"""Hand-written samples with routes: what the engines returned, what a correct stack hands over, and
what a faulty one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.records import Span
from rollproof.core.trace import Trace
from rollproof.invariants.routes import CHECKS
from rollproof.judging.checks import Finding
from rollproof.judging.judge import Judgement
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge
from tests.support.trace_builder import TraceBuilder, contract

__all__ = [
    "CONVENTIONS",
    "MODELS",
    "RoutedRequest",
    "Segment",
    "edited",
    "failing",
    "filler",
    "only_finding",
]

REGISTRY = Registry(CHECKS)

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense first": {"num_layers": 4, "moe_layers": (1, 2, 3)},
    "moe axis": {"num_layers": 5, "moe_layers": (1, 3, 4), "layer_axis": "moe"},
    "wide": {"num_experts": 128, "top_k": 8, "num_layers": 6, "moe_layers": tuple(range(6))},
    "many experts": {"num_experts": 300, "top_k": 3, "dtype": "uint16"},
    "top 1": {"num_experts": 32, "top_k": 1, "dtype": "int32"},
    "all experts": {"num_experts": 2, "top_k": 2},
    "one layer": {"num_layers": 1, "moe_layers": (0,), "num_experts": 2, "top_k": 1},
}
"""Shapes of a model, as fields of a contract."""
CONVENTIONS: dict[str, dict[str, Any]] = {
    "T-1": {},
    "latest prefill": {"provenance": "latest-prefill"},
    "T, arange": {"rows": "T", "final_row": "arange"},
    "T, minus one": {"rows": "T", "final_row": "minus-one", "dtype": "int32"},
    "T, zeros": {"rows": "T", "final_row": "zeros", "filler": "zeros"},
    "T, previous": {"rows": "T", "final_row": "previous"},
    "prefix": {"rows": "captured-prefix"},
}
"""What the rows of a sample are, as fields of a contract."""


@dataclass(frozen=True)
class Segment:
    """One engine call: the tokens that it samples, the version that samples them, and whether its
    reply has routes.
    """

    tokens: int
    version: int = 1
    routes: bool = True


def filler(kind: str, like: np.ndarray) -> np.ndarray:
    """One row of filler, of the layers, top_k and type of the rows ``like``."""
    value = {
        "minus-one": np.array(-1),
        "zeros": np.array(0),
        "arange": np.arange(like.shape[-1]),
        "previous": like[-1],
    }[kind]
    return np.broadcast_to(value, (1, *like.shape[1:])).astype(like.dtype)


@cache
def _draws(seed: int, request: int, version: int, layers: int, experts: int) -> np.ndarray:
    """A permutation of the experts for each position and layer; few positions where there are many
    experts.
    """
    rng = np.random.default_rng([seed, request, version])
    return rng.random((24 if experts > 128 else 320, layers, experts)).argsort(axis=2)


@dataclass
class RoutedRequest:
    """A resumed request under a contract. ``engine_rows`` is ``T-1`` or a filler kind of engines
    that return T rows.
    """

    segments: Sequence[Segment] = (Segment(3, 1), Segment(2, 2))
    prompt: int = 5
    request_id: str = "r0"
    engine_rows: str = "T-1"
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    with_truth: bool = True

    @cached_property
    def contract(self) -> Contract:
        """The subject's contract, and the engines'."""
        return contract(**self.changes)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response, ids that do not repeat between requests."""
        base = 1000 * (1 + int(self.request_id[1:]))
        return tuple(range(base, base + self.prompt + sum(s.tokens for s in self.segments)))

    def rows(self, start: int, stop: int, version: int) -> np.ndarray:
        """Rows of a router: distinct experts drawn by request, version, position and layer; zeros
        in dense layers' columns.
        """
        c = self.contract
        assert c.num_experts is not None and c.top_k is not None
        out = np.zeros((max(0, stop - start), c.route_layers, c.top_k), dtype=c.dtypes[0])
        drawn = _draws(
            self.seed, int(self.request_id[1:]), version, len(c.moe_columns), c.num_experts
        )
        out[:, list(c.moe_columns)] = drawn[start : max(start, stop), :, : c.top_k]
        return out

    def returned(self, number: int) -> np.ndarray | None:
        """The routes of one segment's reply."""
        segment = self.segments[number]
        sent = self.prompt + sum(s.tokens for s in self.segments[:number])
        if not segment.routes or not segment.tokens:
            return None
        rows = self.rows(0, sent + segment.tokens - 1, segment.version)
        if self.engine_rows == "T-1":
            return rows
        return np.concatenate([rows, filler(self.engine_rows, rows)])

    def captured(self) -> np.ndarray:
        """The T-1 rows that a correct stack hands over under the declared provenance."""
        parts = [self.rows(0, 0, 0)]
        for number in range(len(self.segments)):
            got = self.returned(number)
            if got is None:
                continue
            got = got[: self.prompt + sum(s.tokens for s in self.segments[: number + 1]) - 1]
            if self.contract.provenance == "latest-prefill":
                parts = [got]
            else:
                parts.append(got[sum(map(len, parts)) :])
        return np.concatenate(parts)

    def good(self) -> np.ndarray:
        """What a correct stack hands over under the declared row count, final row included."""
        rows, c = self.captured(), self.contract
        if c.rows != "T":
            return rows
        assert c.final_row is not None
        return np.concatenate([rows, filler(str(c.final_row), rows)])

    def record_in(
        self,
        builder: TraceBuilder,
        routes: np.ndarray | None,
        keep: int | None = None,
        **result: Any,
    ) -> None:
        """Record the request: its calls, replies, and a sample with ``routes`` and the first
        ``keep`` response tokens (all).
        """
        ids, sent = self.ids, self.prompt
        builder.submit(self.request_id, ids[:sent], max_tokens=len(ids) - sent)
        for number, segment in enumerate(self.segments):
            last = number == len(self.segments) - 1
            if number == 0 or segment.version != self.segments[number - 1].version:
                builder.weights(segment.version)
            call = builder.call(ids[:sent], self.request_id)
            tokens = ids[sent : sent + segment.tokens]
            rows = self.returned(number)
            spans = (Span(start=0, end=sent + segment.tokens - 1, version=segment.version),)
            truth: dict[str, Any] = {"true_rows": spans} if self.with_truth else {}
            builder.reply(
                call,
                tokens,
                "length" if last else "abort",
                version=segment.version,
                output={"routes": rows},
                **truth,
            )
            sent += segment.tokens
        response = ids[self.prompt :][:keep]
        builder.result(response, self.request_id, ids[: self.prompt], routes=routes, **result)

    def trace(
        self,
        routes: np.ndarray | None,
        *others: RoutedRequest,
        keep: int | None = None,
        **result: Any,
    ) -> Trace:
        """A trace of ``others``, told correctly, and of this request with ``routes``."""
        builder = TraceBuilder(self.contract)
        for other in others:
            other.record_in(builder, other.good())
        self.record_in(builder, routes, keep, **result)
        return builder.trace()

    def judged(
        self,
        routes: np.ndarray | None,
        *others: RoutedRequest,
        keep: int | None = None,
        **result: Any,
    ) -> Judgement:
        """The verdicts of the route checks."""
        return judge(self.trace(routes, *others, keep=keep, **result), REGISTRY)


def failing(judgement: Judgement) -> set[str]:
    """Ids of the checks that found something; no check may have crashed."""
    assert [r.id for r in judgement.results if "crashed" in r.reason] == []
    return set(judgement.failed)


def only_finding(judgement: Judgement, check_id: str) -> Finding:
    """The one finding of the one check that failed."""
    assert failing(judgement) == {check_id}
    (finding,) = judgement[check_id].findings
    return finding


def edited(story: RoutedRequest, position: int | slice, value: Any) -> np.ndarray:
    rows = story.good().copy()
    rows[position] = value
    return rows
