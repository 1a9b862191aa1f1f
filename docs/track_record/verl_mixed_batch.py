"""Whether a batch has routes and logprobs is decided by its first sample: the others' are dropped, or the batch dies."""

import asyncio

import numpy as np
from verl_stub import VERSION, agent_loop, batch


def sample(routes):
    return agent_loop.AgentLoopOutput(
        prompt_ids=[1, 2], response_ids=[3], response_mask=[1], routed_experts=routes, metrics={}, extra_fields={}
    )


rows = np.full((2, 1, 2), 9)
for name, order in {"without routes first": (None, rows), "with routes first": (rows, None)}.items():
    try:
        tensors = asyncio.run(batch([sample(routes) for routes in order])).batch
        print(VERSION, f"{name}: the batch has routed_experts: {'routed_experts' in tensors.keys()}")
    except TypeError as error:
        print(VERSION, f"{name}: {type(error).__name__}: {error}")
