"""A policy of the user's own that raises: who asked for what it fails on is told so, and nobody
else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.records import EngineOutput, IntArray, LogprobArray
from rollproof.core.trace import Recorder
from rollproof.errors import SubjectError
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.coded.hashing import Hashes
from rollproof.fakes.coded.policy import CodedPolicy, Stretch
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.verification.runner import run_case
from tests.support.engine_driver import on_clock
from tests.support.runner_case import CASE

MODEL = Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=64, top_k=4)


def made(policy: type[CodedPolicy], model: Model = MODEL) -> CodedPolicy:
    """A policy of that class for the model."""
    shape = {"num_layers": model.num_layers, "num_experts": model.num_experts, "top_k": model.top_k}
    return policy(seed=3, vocab=model.vocab, moe_layers=tuple(model.moe_layers), **shape)


class Superstitious(CodedPolicy):
    """Has no logprobs for what follows token 13."""

    def logprobs_many(
        self, stretches: Sequence[Stretch], hashes: Sequence[Hashes]
    ) -> list[LogprobArray]:
        if any(13 in ids for _, ids, _, _ in stretches):
            raise ZeroDivisionError("no logprob after 13")
        return super().logprobs_many(stretches, hashes)


class Routeless(CodedPolicy):
    def routes_many(self, stretches: Sequence[Stretch], hashes: Sequence[Hashes]) -> list[IntArray]:
        raise ValueError("no routes")


async def _answers(
    policy: type[CodedPolicy], *prompts: tuple[int, ...]
) -> list[EngineOutput | BaseException]:
    """Of calls that end in one step."""
    recorder = Recorder(asyncio.get_running_loop().time)
    engine = FakeEngine("s0", made(policy), FLAVOURS["vllm"], EngineOptions(), recorder)
    return list(
        await asyncio.gather(
            *(engine.generate(prompt_ids=one, max_tokens=3) for one in prompts),
            return_exceptions=True,
        )
    )


def test_the_error_is_that_of_the_call_that_it_is_about() -> None:
    """Calls that end together are answered in one pass; where that fails, each for itself."""
    prompts = (5, 6), (5, 13), (7, 8)
    right, wrong, other = on_clock(lambda: _answers(Superstitious, *prompts))
    alone, beside = on_clock(lambda: _answers(CodedPolicy, (5, 6), (7, 8)))

    assert isinstance(right, EngineOutput) and isinstance(other, EngineOutput)
    assert isinstance(alone, EngineOutput) and isinstance(beside, EngineOutput)
    assert [alone.token_ids, beside.token_ids] == [right.token_ids, other.token_ids]
    assert isinstance(wrong, SubjectError)
    assert (
        "The policy Superstitious raised ZeroDivisionError: no logprob after 13"
        " (test_failing_policy.py:" in str(wrong)
    )
    assert "when the reply to call 2 was made." in str(wrong)
    assert isinstance(wrong.__cause__, ZeroDivisionError)


def test_every_caller_of_a_policy_that_always_raises_is_told() -> None:
    """And no one gets a bare ``AssertionError``."""
    errors = on_clock(lambda: _answers(Routeless, (5, 6), (7, 8)))

    assert [SubjectError, SubjectError] == [type(error) for error in errors]
    assert all(
        "The policy Routeless raised ValueError: no routes" in str(error) for error in errors
    )


def test_a_stack_is_not_blamed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends with the error of the policy: it is no outcome of the stack's."""
    monkeypatch.setattr(
        CodedPolicy, "from_model", staticmethod(lambda model, seed: made(Routeless, model))
    )

    with pytest.raises(SubjectError, match="The policy Routeless raised ValueError: no routes"):
        run_case(AsSampled, CASE)
