"""Replies of a fake engine when KV is kept, shared, flushed or computed again."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Admit, Reply, Weights
from rollproof.fakes.engine.kv_cache import MIXED
from tests.support.engine_driver import PROMPT, EngineDriver, on_clock, pure, spans

A, B = 0, 1


# The oracle of mixed policies: prompt under A, two tokens under A, reload B, the rest under B


async def _across(bench: EngineDriver, mode: PauseMode, clear: bool) -> Reply:
    """Run one call of 6 tokens; after two of them the weights change."""
    call = bench.call(6)
    await bench.steps(2)
    await bench.engine.pause(mode, clear)
    await bench.engine.load(B, B)
    await bench.engine.resume()
    await call
    return bench.reply()


ACROSS = [
    # flavour, mode, clear, rows, tokens
    ("vllm", PauseMode.KEEP, True, spans((0, 5, A), (5, 9, B)), spans((0, 2, A), (2, 6, B))),
    (
        "vllm",
        PauseMode.KEEP,
        False,
        spans((0, 5, A), (5, 9, MIXED)),
        spans((0, 2, A), (2, 6, MIXED)),
    ),
    (
        "vllm",
        PauseMode.IN_PLACE,
        True,
        spans((0, 5, A), (5, 9, MIXED)),
        spans((0, 2, A), (2, 6, MIXED)),
    ),
    ("sglang", PauseMode.RETRACT, True, spans((0, 9, B)), spans((0, 2, A), (2, 6, B))),
    (
        "sglang",
        PauseMode.IN_PLACE,
        False,
        spans((0, 5, A), (5, 9, MIXED)),
        spans((0, 2, A), (2, 6, MIXED)),
    ),
]


@pytest.mark.parametrize(("flavour", "mode", "clear", "rows", "tokens"), ACROSS)
def test_rows_of_a_frozen_call_across_an_update(
    flavour: str, mode: PauseMode, clear: bool, rows: Any, tokens: Any
) -> None:
    """As measured on vLLM 0.32 (keep with and without clearing) and on SGLang (retraction
    overwrites rows by KV slot).

    Rows of tokens already sampled stay those of A where the engine keeps them; the boundary row,
    that of the last token before the update, is computed by B; over KV of A, B computes what
    neither policy would.
    """

    async def main() -> None:
        bench = EngineDriver(flavour)
        reply = await _across(bench, mode, clear)
        assert (reply.true_rows, reply.true_tokens) == (rows, tokens)
        output, policy = reply.output, bench.policy
        ids = [*PROMPT, *output.token_ids]
        assert output.routes is not None
        for span in rows:
            for version in (A, B):
                found = pure(policy, version, ids, output.routes)[span.start : span.end]
                assert found.all() if span.version == version else not found.any()
        assert output.logprobs is not None
        for span in tokens:
            for version in (A, B):
                same = (output.logprobs == policy.logprobs(version, ids, len(PROMPT)))[
                    span.start : span.end
                ]
                assert same.all() if span.version == version else not same.any()

    on_clock(main)


@pytest.mark.parametrize(
    ("cache", "clear", "rows"),
    [
        (True, True, spans((0, 9, B))),
        (False, False, spans((0, 9, B))),
        (True, False, spans((0, 5, A), (5, 9, MIXED))),
    ],
)
def test_rows_of_a_call_sent_again_after_an_update(cache: bool, clear: bool, rows: Any) -> None:
    """Abort and resume: the second array is all B, unless a prefix cache that outlived the update
    serves the KV of A.
    """

    async def main() -> None:
        bench = EngineDriver(prefix_cache=cache)
        call = bench.call(6)
        await bench.steps(2)
        await bench.engine.pause(PauseMode.ABORT, clear)
        await bench.engine.load(B, B)
        await bench.engine.resume()
        first = await call
        second = await bench.call(4, (*PROMPT, *first.token_ids))
        assert bench.reply(2).true_rows == rows
        assert second.cached_tokens == (5 if cache and not clear else 0)
        assert bench.events(Weights)[0].flushed is (clear or not cache)

    on_clock(main)


def test_rows_from_a_requested_start() -> None:
    """Resuming with ``routes_start`` = rows so far returns exactly the missing rows, with the
    boundary row.
    """

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(6)
        await bench.steps(2)
        await bench.engine.abort()
        first = call.result()
        ids = (*PROMPT, *first.token_ids)
        second = await bench.call(4, ids, routes_start=len(ids) - 1)
        assert first.routes is not None
        assert second.routes is not None
        rows = bench.rows(A, [*ids, *second.token_ids])
        np.testing.assert_array_equal(np.concatenate([first.routes, second.routes]), rows)

    on_clock(main)


# KV that is shared, and KV that runs out


def test_prefix_cache_shares_kv_of_the_same_prefix() -> None:
    """A second call with the same prompt gets all of it but the last token from the cache, with the
    first call's rows.
    """

    async def main() -> None:
        bench = EngineDriver(prefix_cache=True)
        first, second = await bench.call(3), await bench.call(3)
        assert (first.cached_tokens, second.cached_tokens) == (0, 3)
        np.testing.assert_array_equal(first.routes, second.routes)
        assert (await bench.call(3, (*PROMPT[:2], 99))).cached_tokens == 2
        bench.engine.reset_prefix_cache()
        assert (await bench.call(3)).cached_tokens == 0

    on_clock(main)


@pytest.mark.parametrize("finished", [False, True])
def test_kv_that_outlives_a_flush_is_not_shared(finished: bool) -> None:
    """A call that ran when the prefix cache was cleared does not store its older KV at its end."""

    async def main() -> None:
        bench = EngineDriver(prefix_cache=True)
        call = bench.call(4)
        await bench.steps(1)
        bench.engine.reset_prefix_cache()
        if finished:
            await call
        await bench.engine.load(B, B)
        await call
        assert (await bench.call(2)).cached_tokens == 0
        assert bench.reply(2).true_rows == spans((0, 5, B))

    on_clock(main)


@pytest.mark.parametrize(("flavour", "old_rows"), [("vllm", A), ("sglang", B)])
def test_rows_after_an_eviction_across_an_update(flavour: str, old_rows: int) -> None:
    """A preempted call prefills again: its old rows stay on vLLM and are overwritten on SGLang; its
    tokens stay those of A.
    """

    async def main() -> None:
        bench = EngineDriver(flavour)
        call = bench.call(5)
        await bench.steps(2)
        assert bench.engine.evict(1)
        await bench.engine.load(B, B)
        await call
        reply = bench.reply()
        assert reply.true_tokens == spans((0, 2, A), (2, 5, B))
        assert reply.true_rows == (
            spans((0, 5, A), (5, 8, B)) if old_rows == A else spans((0, 8, B))
        )
        assert not bench.engine.evict(1)

    on_clock(main)


def test_preemption_takes_the_youngest_and_loses_nothing() -> None:
    """Beyond ``kv_tokens`` the youngest call loses its KV and waits; every call still ends with all
    its tokens and rows.
    """

    async def main() -> None:
        bench = EngineDriver(kv_tokens=14)
        calls = [bench.call(6, (9, number, 1)) for number in range(3)]
        outputs = await asyncio.gather(*calls)
        assert [(event.call_id, event.time) for event in bench.events(Admit)] == [
            (1, 0.0),
            (2, 0.0),
            (3, 0.0),
            (2, 6.0),
            (3, 6.0),
        ]
        for number, output in enumerate(outputs):
            ids = [9, number, 1, *output.token_ids]
            assert bench.policy.choices(A, ids, 3).tolist() == list(output.token_ids)
            np.testing.assert_array_equal(output.routes, bench.rows(A, ids))
        assert set(bench.engine.gauges().values()) == {0.0}

    on_clock(main)


def test_one_call_may_exceed_the_capacity() -> None:
    """A call that does not fit even alone still ends: the fake does not deadlock."""

    async def main() -> None:
        bench = EngineDriver(kv_tokens=2)
        outputs = await asyncio.gather(bench.call(5), bench.call(5, (9, 9, 9)))
        assert [len(output.token_ids) for output in outputs] == [5, 5]

    on_clock(main)
