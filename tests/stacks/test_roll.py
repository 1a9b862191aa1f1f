"""The fake of SGLang's tokenizer manager in ROLL's adapter; it needs no ROLL."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from rollproof.core.case import Case
from rollproof.core.events.rollout import Pause, Reply, Weights
from rollproof.core.records import Request
from rollproof.core.trace import Recorder
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.simulation import virtual_loop
from rollproof.stacks.roll.rollout import LoopSubject, TokenizerManager

REQUEST = Request(request_id="r", prompt_ids=(2, 3, 4), max_tokens=5)


def sglang_request(rid: str) -> Any:
    """A request as ROLL sends it to SGLang."""
    return SimpleNamespace(
        input_ids=[2, 3, 4],
        rid=rid,
        sampling_params={"max_new_tokens": 5, "n": 1},
        return_logprob=True,
        return_routed_experts=False,
    )


def engine_of_a_fleet() -> FakeEngine:
    """The engine of a fleet of one server."""
    return Fleet(
        Case(flavour="sglang", requests=(REQUEST,), servers=1),
        Recorder(asyncio.get_running_loop().time),
    ).servers["s0"]


def test_a_reply_is_a_dictionary_of_sglang_s() -> None:
    """Ids, a logprob and id for each of them, and the finish reason as a dictionary; no routes
    unless they are requested.
    """

    async def main() -> list[dict[str, Any]]:
        return [
            reply
            async for reply in TokenizerManager(engine_of_a_fleet()).generate_request(
                sglang_request("q"), None
            )
        ]

    (reply,) = virtual_loop.run(main)
    assert 5 == len(reply["output_ids"])
    assert reply["output_ids"] == [
        token for _, token, _ in reply["meta_info"]["output_token_logprobs"]
    ]
    assert {"type": "length"} == reply["meta_info"]["finish_reason"]
    assert "routed_experts" not in reply["meta_info"]


def test_an_abort_is_sent_and_ends_the_call_of_its_id() -> None:
    """The caller waits for nothing; the call that has the id ends, another does not."""

    async def main() -> list[str]:
        manager = TokenizerManager(engine_of_a_fleet())
        calls = [
            asyncio.ensure_future(anext(manager.generate_request(sglang_request(rid), None)))
            for rid in ("a", "b")
        ]
        await asyncio.sleep(1.5)
        manager.abort_request("a")
        return [
            reply["meta_info"]["finish_reason"]["type"] for reply in await asyncio.gather(*calls)
        ]

    assert ["abort", "length"] == virtual_loop.run(main)


def test_an_abort_to_a_dead_server_is_lost() -> None:
    """Nothing is raised."""

    async def main() -> None:
        engine = engine_of_a_fleet()
        engine.kill()
        TokenizerManager(engine).abort_request("a")
        await asyncio.sleep(1)

    virtual_loop.run(main)


def test_only_roll_itself_keeps_calls_away_from_weights_that_change() -> None:
    """The model update pauses no engine: a call that ROLL forgot to abort is sampled on, under the
    new weights, and judged so.
    """

    async def main() -> list[Any]:
        engine = engine_of_a_fleet()
        subject = object.__new__(LoopSubject)
        subject._fleet = SimpleNamespace(servers={"s0": engine}, weights_of=lambda label: label)
        call = asyncio.ensure_future(
            anext(TokenizerManager(engine).generate_request(sglang_request("a"), None))
        )
        await asyncio.sleep(1.5)
        await subject._model_update(3)
        result = await call
        assert "length" == result["meta_info"]["finish_reason"]["type"]
        return list(engine._recorder.events)

    events = virtual_loop.run(main)
    assert [] == [event for event in events if isinstance(event, Pause)]
    assert [3] == [
        event.version for event in events if isinstance(event, Weights) and event.version
    ]
    (reply,) = [event for event in events if isinstance(event, Reply)]
    assert [0, "mixed"] == [span.version for span in reply.true_tokens]
