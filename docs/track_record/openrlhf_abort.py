"""A call that was aborted is handed over as one that was not truncated: only the reason ``length`` is read."""

import asyncio
import importlib.metadata
from types import SimpleNamespace as Bag

import torch

from openrlhf.utils.agent import SingleTurnAgentExecutor

VERSION = importlib.metadata.version("openrlhf")


class Engine:
    async def generate(self, ids, params, multi_modal_data=None):
        return Bag(
            outputs=[
                Bag(
                    token_ids=[7, 8],
                    text="7 8",
                    logprobs=[{7: Bag(logprob=-0.5)}, {}],
                    finish_reason="abort",
                )
            ]
        )


async def main():
    tokenizer = lambda text, **_: {
        "input_ids": torch.tensor([[int(word) for word in text.split()]])
    }
    output = await SingleTurnAgentExecutor().execute(
        "5 6", None, Bag(max_tokens=8, logprobs=0), 10, tokenizer, Engine()
    )
    print(
        f"openrlhf {VERSION}: aborted after 2 of 8 tokens: truncated {output['truncated']}, actions {output['action_ranges']}"
    )
    print(f"openrlhf {VERSION}: a logprob that is missing: {output['rollout_log_probs']}")


asyncio.run(main())
