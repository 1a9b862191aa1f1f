"""The multi-turn executor writes the budget of a turn into the caller's sampling parameters, in place of the limit that they state."""

import asyncio
import importlib.metadata
from types import SimpleNamespace as Bag

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

VERSION = importlib.metadata.version("openrlhf")


class Once(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, states, **_):
        return {"rewards": torch.tensor(0.0), "environment_feedback": "", "done": True}


class Engine:
    async def generate(self, ids, params, multi_modal_data=None):
        return Bag(
            outputs=[
                Bag(
                    token_ids=[7],
                    text="7",
                    logprobs=[{7: Bag(logprob=-0.5)}],
                    finish_reason=f"asked for {params.max_tokens}",
                )
            ]
        )


params = Bag(max_tokens=4, logprobs=0)
tokenizer = lambda text, **_: {
    "input_ids": torch.tensor([[int(word) for word in text.split()]], dtype=torch.long)
}
asyncio.run(MultiTurnAgentExecutor(Once).execute("5 6", None, params, 100, tokenizer, Engine()))
print(f"openrlhf {VERSION}: max_tokens 4 of the caller is {params.max_tokens} afterwards")
