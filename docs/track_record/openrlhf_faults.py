"""Faults of OpenRLHF: `python docs/track_record/openrlhf_faults.py [NAME ...]`.

The engine is replaced by one with a scripted reply.
"""

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import torch
from common import run, stub_packages

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor

VERSION = f"openrlhf {importlib.metadata.version('openrlhf')}:"


class Engine:
    """Replies with the same completion to every call."""

    def __init__(self, tokens: list[int], logprobs: list[Any], finish_reason: str) -> None:
        self.completion = SimpleNamespace(
            token_ids=tokens,
            text=" ".join(map(str, tokens)),
            logprobs=logprobs,
            finish_reason=finish_reason,
        )

    async def generate(self, ids: Any, params: Any, multi_modal_data: Any = None) -> Any:
        return SimpleNamespace(outputs=[self.completion])


class OneTurn(AgentInstanceBase):
    """An environment that ends after the first turn."""

    def __init__(self) -> None:
        pass

    async def step(self, states: Any, **_: Any) -> dict[str, Any]:
        return {"rewards": torch.tensor(0.0), "environment_feedback": "", "done": True}


def tokenizer(text: str, **_: Any) -> dict[str, Any]:
    ids = [int(word) for word in text.split()]
    return {"input_ids": torch.tensor([ids], dtype=torch.long)}


async def abort() -> None:
    """A call that was aborted is returned as one that was not truncated: only the reason ``length``
    is read.
    """
    engine = Engine([7, 8], [{7: SimpleNamespace(logprob=-0.5)}, {}], "abort")
    params = SimpleNamespace(max_tokens=8, logprobs=0)
    output = await SingleTurnAgentExecutor().execute("5 6", None, params, 10, tokenizer, engine)
    result = f"truncated {output['truncated']}, actions {output['action_ranges']}"
    print(VERSION, f"aborted after 2 of 8 tokens: {result}")
    print(VERSION, f"a logprob that is missing: {output['rollout_log_probs']}")


async def caller_params() -> None:
    """The multi-turn executor writes the budget of a turn into the caller's sampling parameters, in
    place of the limit that they state.
    """
    engine = Engine([7], [{7: SimpleNamespace(logprob=-0.5)}], "stop")
    params = SimpleNamespace(max_tokens=4, logprobs=0)
    executor = MultiTurnAgentExecutor(OneTurn)
    await executor.execute("5 6", None, params, 100, tokenizer, engine)
    print(VERSION, f"max_tokens 4 of the caller is {params.max_tokens} afterwards")


def filter_ratio() -> None:
    """A sequence of which no token is trained has the mean 0 / 0: it counts as filtered."""
    stub_packages("deepspeed", "flash_attn", "peft", "transformers")
    from openrlhf.models.loss import PolicyLoss

    logprobs, mask = torch.full((4, 3), -1.0), torch.ones(4, 3)
    mask[1:] = 0
    loss = PolicyLoss(is_correction_level="seq", is_correction_threshold=[0.5, 2.0])
    *_, ratio = loss(logprobs, logprobs, torch.ones(4, 3), mask, logprobs)
    print(VERSION, f"all logprobs are equal, 3 of 4 sequences are masked: {ratio:.2f} filtered")


if __name__ == "__main__":
    run(abort, caller_params, filter_ratio)
