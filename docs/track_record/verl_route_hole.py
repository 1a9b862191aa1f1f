"""A segment without routes leaves a hole that is closed: later rows stand at earlier positions, and nothing says so.

SGLang answers so when a request is aborted in its waiting queue after a retraction: tokens and logprobs, no ``routed_experts``.
"""

import asyncio

import torch
from verl_stub import VERSION, Server, client


def routes(rows):
    return (
        None if rows[-1, 0, 0] // 100 == 2 else torch.as_tensor(rows)
    )  # the segment of step 2 comes without


server = Server((2, "abort", 1), (2, "abort", 2), (2, "stop", 3), routes=routes)
out = asyncio.run(
    client(server).generate("r", prompt_ids=[1, 2], sampling_params={"max_tokens": 8})
)
print(
    VERSION,
    "prompt 2 + tokens of steps",
    [t // 100 for t in out.token_ids],
    "need 7 rows; there are",
    len(out.routed_experts),
)
print(
    VERSION,
    "row i was computed for position",
    [int(row) % 100 for row in out.routed_experts[:, 0, 0]],
)
