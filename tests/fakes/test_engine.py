"""The fake engine batches, samples and changes weights as measured on real ones."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Call, Fault, Reply, Weights
from rollproof.core.records import FinishReason
from rollproof.fakes.engine.exceptions import BadCall, TransferFailed
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.engine.kv_cache import MIXED
from rollproof.fakes.engine.scheduler import EngineHooks
from tests.support.engine_driver import PROMPT, EngineDriver, on_clock, pure, spans

A, B = 0, 1


def test_a_call_returns_what_the_policy_samples() -> None:
    """Tokens, logprobs and rows of an undisturbed call are those of the policy under the engine's
    weights.
    """

    async def main() -> None:
        bench = EngineDriver()
        output = await bench.call(6)
        ids = [*PROMPT, *output.token_ids]
        assert bench.policy.choices(A, ids, len(PROMPT)).tolist() == list(output.token_ids)
        np.testing.assert_array_equal(output.logprobs, bench.policy.logprobs(A, ids, len(PROMPT)))
        np.testing.assert_array_equal(output.routes, bench.rows(A, ids))
        assert output.finish_reason is FinishReason.LENGTH
        reply = bench.reply()
        assert (reply.true_tokens, reply.true_rows) == (spans((0, 6, A)), spans((0, 9, A)))

    on_clock(main)


def test_a_call_ends_at_the_end_of_sequence() -> None:
    """The end-of-sequence token ends a call with ``stop``, is itself returned, and wins over the
    budget on the last token.
    """

    async def main() -> None:
        for seed_prompt in range(30):
            bench = EngineDriver(model=Model(eos_every=3))
            output = await bench.call(4, (seed_prompt + 1,))
            eos = bench.policy.eos_id
            assert eos not in output.token_ids[:-1]
            stopped = output.token_ids[-1] == eos
            assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(output.token_ids) == 4

    on_clock(main)


def test_the_stop_tokens_of_a_call_are_recorded() -> None:
    """Those of the model apart from the caller's own; a call without any says nothing of them."""

    async def main() -> None:
        bench = EngineDriver(model=Model(eos_every=3))
        eos = bench.policy.eos_id
        for ends in (None, frozenset({eos, 41}), frozenset({41})):
            await bench.engine.generate(prompt_ids=PROMPT, max_tokens=1, ends=ends)
        calls = bench.events(Call)
        assert [(None, ()), ((eos,), (41,)), ((), (41,))] == [
            (call.end_tokens, call.stop_token_ids) for call in calls
        ]

    on_clock(main)


@pytest.mark.parametrize("kv_tokens", [None, 400])
@pytest.mark.parametrize("every", [None, 9])
def test_steps_that_take_no_time_sample_the_same(every: int | None, kv_tokens: int | None) -> None:
    """Many calls on an engine with steps of no time get the values that each gets alone, also
    across an update.
    """
    model, limits = (
        Model(num_layers=2, moe_layers=(0, 1), num_experts=64, top_k=4, eos_every=every),
        [1 + 7 * i % 90 for i in range(60)],
    )

    async def replies(*, together: bool) -> list[tuple[object, ...]]:
        found = []
        for version in (A, B):
            bench = EngineDriver(
                model=model,
                max_batch=40,
                **({"step": 0.0, "kv_tokens": kv_tokens} if together else {}),
            )
            if version is B:
                await bench.engine.load(B, B)
            tasks = []
            for number, limit in enumerate(limits):
                tasks.append(bench.call(limit, (number + 1, 6)))
                if not together:
                    await tasks[-1]
            for output in await asyncio.gather(*tasks):
                assert output.logprobs is not None and output.routes is not None
                found.append(
                    (
                        output.token_ids,
                        output.finish_reason,
                        output.logprobs.tolist(),
                        output.routes.tolist(),
                    )
                )
        return found

    async def main() -> None:
        assert await replies(together=True) == await replies(together=False)

    on_clock(main)


def test_without_a_budget_a_call_runs_to_the_length_of_the_model() -> None:
    """``max_tokens=None`` samples until prompt and response have the engine's length."""

    async def main() -> None:
        bench = EngineDriver()
        bench.engine.max_length = 20
        output = await bench.call(None)
        assert (len(output.token_ids), output.finish_reason) == (16, FinishReason.LENGTH)

    on_clock(main)


@pytest.mark.parametrize(
    ("prompt", "tokens", "start", "message"),
    [
        ((), 3, 0, "A prompt must have 1 to 4095 tokens, not 0"),
        ((1,) * 4096, 3, 0, "not 4096"),
        ((1, 2), 0, 0, "max_tokens must be at least 1, not 0"),
        ((1, 2), -1, 0, "max_tokens must be at least 1, not -1"),
        ((1, 2), 3, 3, "routes_start must be 0 to 2, the length of the prompt, not 3"),
        ((1, 2), 3, -1, "routes_start must be 0 to 2"),
    ],
)
def test_calls_that_real_engines_refuse(
    prompt: tuple[int, ...], tokens: int, start: int, message: str
) -> None:
    """Such a call raises a ``ValueError`` with the reason; it is recorded, and nothing is left of
    it.
    """

    async def main() -> None:
        bench = EngineDriver()
        with pytest.raises(BadCall, match=message) as raised:
            await bench.call(tokens, prompt, routes_start=start)
        assert isinstance(raised.value, ValueError)
        assert len(bench.events(Call)) == 1
        assert bench.events(Admit) == []
        assert set(bench.engine.gauges().values()) == {0.0}

    on_clock(main)


def test_calls_are_batched() -> None:
    """Calls run together up to ``max_batch``; the others wait their turn, in order."""

    async def main() -> None:
        bench = EngineDriver(max_batch=2)
        calls = [bench.call(tokens, (9, number)) for number, tokens in enumerate((2, 5, 3))]
        await asyncio.gather(*calls)
        assert [(event.call_id, event.time) for event in bench.events(Admit)] == [
            (1, 0.0),
            (2, 0.0),
            (3, 2.0),
        ]
        assert [(event.call_id, event.time) for event in bench.events(Reply)] == [
            (1, 2.0),
            (2, 5.0),
            (3, 5.0),
        ]

    on_clock(main)


@pytest.mark.parametrize(("chunk", "first_token"), [(None, 1.0), (4, 1.0), (3, 2.0), (1, 4.0)])
def test_chunked_prefill_delays_the_first_token_and_changes_nothing_else(
    chunk: int | None, first_token: float
) -> None:
    """A prompt of four tokens takes ``ceil(4 / chunk)`` steps; tokens and rows are the same."""

    async def main() -> None:
        bench = EngineDriver(prefill_chunk=chunk)
        output = await bench.call(1)
        assert bench.reply().time == first_token
        np.testing.assert_array_equal(output.routes, bench.rows(A, [*PROMPT, *output.token_ids]))

    on_clock(main)


def test_chunked_prefill_shares_a_step_among_calls() -> None:
    """A chunk is the budget of a step, not of a call: two prompts of four tokens take twice as
    long.
    """

    async def main() -> None:
        bench = EngineDriver(prefill_chunk=4)
        await asyncio.gather(bench.call(1), bench.call(1, (9, 9, 9, 9)))
        assert [event.time for event in bench.events(Reply)] == [1.0, 2.0]

    on_clock(main)


def test_weights_that_change_during_prefill_mix() -> None:
    """A prompt prefilled half under A and half under B has mixed KV, so neither explains its first
    token.
    """

    async def main() -> None:
        bench = EngineDriver(prefill_chunk=1)
        call = bench.call(2)
        await bench.steps(1)
        await bench.engine.load(B, B)
        await call
        reply = bench.reply()
        assert reply.true_rows == spans((0, 2, A), (2, 5, MIXED))
        assert reply.true_tokens == spans((0, 2, MIXED))

    on_clock(main)


def test_weights_change_while_a_call_runs() -> None:
    """After an update without a pause the next token uses the new weights; old KV stays, so later
    values are mixed.
    """

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(6)
        await bench.steps(2)
        await bench.engine.load(B, "new")
        output = await call
        reply = bench.reply()
        assert reply.true_tokens == spans((0, 3, A), (3, 6, MIXED))
        assert reply.true_rows == spans((0, 6, A), (6, 9, MIXED))
        assert output.spans == spans((0, 3, 0), (3, 6, "new"))
        assert bench.events(Weights)[0].progress == {1: 3}
        assert output.routes is not None
        ids = [*PROMPT, *output.token_ids]
        assert pure(bench.policy, A, ids, output.routes).tolist() == [True] * 6 + [False] * 3
        assert not pure(bench.policy, B, ids, output.routes)[6:].any()

    on_clock(main)


def test_a_failed_transfer_leaves_the_old_weights() -> None:
    """``fail_next_load`` breaks one transfer; the next one succeeds."""

    async def main() -> None:
        bench = EngineDriver()
        bench.engine.fail_next_load = True
        with pytest.raises(TransferFailed, match="it still serves version 0"):
            await bench.engine.load(B, B)
        assert (bench.engine.version, bench.events(Weights), bench.events(Fault)[0].what) == (
            A,
            [],
            "update-failure",
        )
        await bench.engine.load(B, B)
        assert (bench.engine.version, bench.engine.label) == (B, B)

    on_clock(main)


# Labels, arrays


def test_a_new_label_changes_nothing_but_the_label() -> None:
    """Publishing a label does not end, delay or change a call; later tokens show it."""

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(4)
        await bench.steps(2)
        bench.engine.relabel("v9")
        output = await call
        assert output.spans == spans((0, 2, 0), (2, 4, "v9"))
        assert bench.reply().true_tokens == spans((0, 4, A))
        assert (output.finish_reason, bench.events(Weights)[0].loaded) == (
            FinishReason.LENGTH,
            False,
        )

    on_clock(main)


def test_equal_weights_change_nothing() -> None:
    """An update to equal weights leaves KV and values pure, under the new label."""

    async def main() -> None:
        bench = EngineDriver()
        call = bench.call(4)
        await bench.steps(1)
        await bench.engine.load(A, "again", identity=True)
        output = await call
        assert bench.reply().true_tokens == spans((0, 4, A))
        assert output.spans == spans((0, 2, 0), (2, 4, "again"))

    on_clock(main)


def test_a_callers_changes_to_its_arrays_do_not_reach_the_trace() -> None:
    """The caller gets arrays of its own."""

    async def main() -> None:
        bench = EngineDriver()
        output = await bench.call(3)
        assert output.routes is not None
        assert output.logprobs is not None
        before = bench.reply().output.routes
        assert before is not None
        expected = before.copy()
        output.routes[:] = 99
        output.logprobs[:] = 0.0
        np.testing.assert_array_equal(before, expected)
        np.testing.assert_array_equal(
            bench.reply().output.logprobs,
            bench.policy.logprobs(A, [*PROMPT, *output.token_ids], len(PROMPT)),
        )

    on_clock(main)


def test_values_that_were_not_requested_are_absent() -> None:
    """``want_routes`` and ``want_logprobs`` are honoured; the tokens are the same."""

    async def main() -> None:
        bench = EngineDriver()
        bare, full = (
            await bench.call(3, want_routes=False, want_logprobs=False),
            await bench.call(3),
        )
        assert (bare.routes, bare.logprobs, bare.token_ids) == (None, None, full.token_ids)

    on_clock(main)


def test_a_call_event_has_its_parameters() -> None:
    """The record of a call has its parameters; values that are not scalars are stored as text."""

    async def main() -> None:
        bench = EngineDriver()
        await bench.call(
            1, sampling={"temperature": 0.5, "stop": ["a"]}, media="image 1", request_id="mine"
        )
        call = bench.events(Call)[0]
        assert (call.sampling, call.media, call.request_id) == (
            {"temperature": 0.5, "stop": "['a']"},
            "image 1",
            "mine",
        )

    on_clock(main)


def _text_of(event: Event) -> str:
    return json.dumps(repr(event))


def test_equal_schedules_give_equal_traces() -> None:
    """The same calls, pauses and updates twice give the same events, to the last array and time."""

    async def main() -> list[str]:
        bench = EngineDriver(max_batch=2, prefill_chunk=3, prefix_cache=True, kv_tokens=20)
        calls = [bench.call(6, (9, number)) for number in range(4)]
        await bench.steps(3)
        await bench.engine.pause(PauseMode.KEEP)
        await bench.engine.load(B, B)
        await bench.engine.resume()
        await bench.steps(1)
        await bench.engine.abort("call-2")
        await asyncio.gather(*calls)
        return [_text_of(event) for event in bench.recorder.events]

    assert on_clock(main) == on_clock(main)


def test_an_engine_without_work_has_no_task() -> None:
    """An idle engine has no task, so the loop can end."""

    async def main() -> None:
        bench = EngineDriver()
        await bench.call(2)
        await asyncio.sleep(5)
        assert [
            task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()
        ] == []

    on_clock(main)


def test_a_fault_of_the_fake_reaches_its_callers() -> None:
    """If computing a step raises, callers get the error instead of waiting forever."""

    async def main() -> None:
        bench = EngineDriver()

        def step() -> None:
            raise ZeroDivisionError("planted")

        bench.engine._scheduler.step = step  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError, match="planted"):
            await bench.call(2)

    on_clock(main)


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_a_finished_call_is_not_retracted(flavour: str) -> None:
    """Engines process their results before they take KV away: a call on its last token keeps its
    rows.
    """

    class Slow(EngineHooks):
        def watches(self, request_id: str) -> bool:
            """Watch every token."""
            return True

        def sampled(self, call: InflightCall) -> bool:
            """Check the end a step later."""
            return True

    async def main() -> None:
        bench = EngineDriver(flavour)
        engine = FakeEngine(
            "s0", bench.policy, bench.flavour, EngineOptions(), bench.recorder, hooks=Slow()
        )
        call = asyncio.ensure_future(engine.generate(prompt_ids=PROMPT, max_tokens=2))
        await bench.steps(2)
        assert not engine.evict(1)
        await engine.pause(PauseMode.RETRACT)
        await engine.load(B, B)
        await engine.resume()
        output = await call
        assert output.finish_reason is FinishReason.LENGTH
        np.testing.assert_array_equal(output.routes, bench.rows(A, [*PROMPT, *output.token_ids]))
        assert bench.events(Weights)[0].flushed

    on_clock(main)
