"""The fakes of Ray, of vLLM's engine and of a run's configuration in NeMo-RL's adapters; none of
them needs NeMo-RL.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollproof.core.case import Case
from rollproof.core.records import Request
from rollproof.core.trace import Recorder
from rollproof.fakes.engine.exceptions import ServerDied
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.simulation import virtual_loop
from rollproof.stacks.nemo_rl.upstream import RayCalls, Ref
from rollproof.stacks.nemo_rl.vllm_generation import AsyncLLM, generation_config, limits

REQUEST = Request(request_id="r", prompt_ids=(2, 3, 4), max_tokens=5, sampling={"temperature": 0.5})


class _TaskError(Exception):
    """Ray's, for this test."""

    def __init__(self, name: str, _text: str, cause: Exception, *_where: Any) -> None:
        super().__init__(name)
        self.cause = cause


RAY = RayCalls(
    SimpleNamespace(exceptions=SimpleNamespace(RayTaskError=_TaskError), nodes=lambda: ["n"])
)


def test_calls_that_return_at_once_need_no_ray() -> None:
    """Values, references and coroutines that wait for nothing, alone or in a list; the rest is
    Ray's own.
    """

    async def immediate() -> int:
        return 3

    assert 1 == RAY.get(1)
    assert [1, 2, 3] == RAY.get([1, Ref(2), immediate()])
    assert ["n"] == RAY.nodes()


def test_a_worker_s_failure_reaches_the_caller_as_ray_wraps_it() -> None:
    """The engine's own error is the cause of a task's."""

    async def died() -> None:
        raise ServerDied("gone")

    with pytest.raises(_TaskError) as caught:
        RAY.get([died()])
    assert isinstance(caught.value.cause, ServerDied)


def test_a_call_that_would_block_is_refused() -> None:
    """NeMo-RL blocks a thread there: nothing could happen meanwhile."""

    async def waits() -> None:
        await asyncio.sleep(1)

    async def got() -> None:
        RAY.get(waits())

    with pytest.raises(RuntimeError, match="had to wait where NeMo-RL blocks its thread"):
        virtual_loop.run(got)


def test_a_run_s_configuration_holds_the_limits_of_its_request() -> None:
    """``max_new_tokens`` is the budget, and the length of the model that of prompt and budget
    together.
    """
    assert (5, 8) == limits(REQUEST)
    assert (1024, 1027) == limits(Request(request_id="r", prompt_ids=(2, 3, 4)))
    config = generation_config(REQUEST)
    assert (5, 8, 0.5, 1.0) == (
        config["max_new_tokens"],
        config["vllm_cfg"]["max_model_len"],
        config["temperature"],
        config["top_p"],
    )


def test_the_engine_clears_no_cache_while_a_call_runs() -> None:
    """As vLLM's block pool: during a call it returns False, and keeps its blocks."""
    finished: list[str] = []

    async def main() -> list[bool]:
        fleet = Fleet(
            Case(flavour="vllm", requests=(REQUEST,), servers=1),
            Recorder(asyncio.get_running_loop().time),
        )
        engine: FakeEngine = fleet.servers["s0"]
        llm = AsyncLLM(engine, routes=False)
        params = SimpleNamespace(max_tokens=5, logprobs=0)
        outputs = llm.generate(
            prompt={"prompt_token_ids": [2, 3, 4]}, sampling_params=params, request_id="q"
        )
        call = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        during = await llm.reset_prefix_cache()
        final = await call
        finished.append(final.outputs[0].finish_reason)
        return [during, await llm.reset_prefix_cache()]

    assert [False, True] == virtual_loop.run(main)
    assert ["length"] == finished
