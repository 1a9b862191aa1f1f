"""A user's policy that raises: the caller of the call that it fails on gets the error, no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.records import EngineOutput, IntArray, LogprobArray
from rollproof.core.trace import Recorder
from rollproof.errors import SubjectError
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.coded.policy import CodedPolicy, VersionSpan
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.verification.runner import run_case
from tests.support.engine_driver import on_clock
from tests.support.runner_case import CASE

MODEL = Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=64, top_k=4)


def make_policy(policy: type[CodedPolicy], model: Model = MODEL) -> CodedPolicy:
    """A policy of that class for the model."""
    shape = {"num_layers": model.num_layers, "num_experts": model.num_experts, "top_k": model.top_k}
    return policy(seed=3, vocab=model.vocab, moe_layers=tuple(model.moe_layers), **shape)


class Superstitious(CodedPolicy):
    """Has no logprobs for what follows token 13."""

    def logprobs_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> LogprobArray:
        if 13 in ids:
            raise ZeroDivisionError("no logprob after 13")
        return super().logprobs_spans(spans, ids, start, stop)


class Routeless(CodedPolicy):
    """Has no routes."""

    def routes_spans(
        self, spans: Iterable[VersionSpan], ids: Sequence[int], start: int, stop: int
    ) -> IntArray:
        raise ValueError("no routes")


async def _answers(
    policy: type[CodedPolicy], *prompts: tuple[int, ...]
) -> list[EngineOutput | BaseException]:
    """Return the outputs of calls that end in the same step, or their errors."""
    recorder = Recorder(asyncio.get_running_loop().time)
    engine = FakeEngine("s0", make_policy(policy), FLAVOURS["vllm"], EngineOptions(), recorder)
    return list(
        await asyncio.gather(
            *(engine.generate(prompt_ids=prompt, max_tokens=3) for prompt in prompts),
            return_exceptions=True,
        )
    )


def test_only_the_call_that_the_policy_fails_on_raises() -> None:
    """Calls that end in the same step are answered independently."""
    prompts = (5, 6), (5, 13), (7, 8)
    right, wrong, other = on_clock(lambda: _answers(Superstitious, *prompts))
    first, last = on_clock(lambda: _answers(CodedPolicy, (5, 6), (7, 8)))

    assert isinstance(right, EngineOutput) and isinstance(other, EngineOutput)
    assert isinstance(first, EngineOutput) and isinstance(last, EngineOutput)
    assert [first.token_ids, last.token_ids] == [right.token_ids, other.token_ids]
    assert isinstance(wrong, SubjectError)
    assert (
        "The policy Superstitious raised ZeroDivisionError: no logprob after 13"
        " (test_failing_policy.py:" in str(wrong)
    )
    assert "when the reply to call 2 was made." in str(wrong)
    assert isinstance(wrong.__cause__, ZeroDivisionError)


def test_each_caller_of_a_policy_that_always_raises_gets_the_error() -> None:
    """No caller gets a bare ``AssertionError``."""
    errors = on_clock(lambda: _answers(Routeless, (5, 6), (7, 8)))

    assert [SubjectError, SubjectError] == [type(error) for error in errors]
    assert all(
        "The policy Routeless raised ValueError: no routes" in str(error) for error in errors
    )


def test_a_stack_is_not_blamed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends with the error of the policy, which is not an outcome of the stack."""
    monkeypatch.setattr(
        CodedPolicy, "from_model", staticmethod(lambda model, seed: make_policy(Routeless, model))
    )

    with pytest.raises(SubjectError, match="The policy Routeless raised ValueError: no routes"):
        run_case(AsSampled, CASE)
