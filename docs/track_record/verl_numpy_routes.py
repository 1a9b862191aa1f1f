"""Routes of a resumed sample are joined by ``torch.cat``, but vLLM returns numpy arrays: the rollout dies (verl#7158)."""

import asyncio

from verl_stub import VERSION, Server, client

try:
    out = asyncio.run(
        client(Server((2, "aborted", 1), (1, "completed", 1))).generate(
            "r", prompt_ids=[1, 2], sampling_params={"max_tokens": 5}
        )
    )
    print(VERSION, "resumed with numpy routes:", len(out.routed_experts), "rows")
except TypeError as error:
    print(VERSION, "resumed with numpy routes:", type(error).__name__, error)
