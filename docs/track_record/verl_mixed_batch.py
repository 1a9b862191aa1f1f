"""Whether a batch has routes and logprobs is decided by its first sample: the others' are dropped, or the batch dies."""

import asyncio

import numpy as np
from verl_stub import VERSION, agent_loop, batch


def sample(**fields):
    return agent_loop.AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[3],
        response_mask=[1],
        metrics={},
        extra_fields={},
        **fields,
    )


for name, key, value in (
    ("routed_experts", "routed_experts", np.full((2, 1, 2), 9)),
    ("response_logprobs", "rollout_log_probs", [-1.5]),
):
    for order in ((None, value), (value, None)):
        first = f"{'without' if order[0] is None else 'with'} {name} first"
        try:
            tensors = asyncio.run(batch([sample(**{name: one}) for one in order])).batch
            print(VERSION, f"{first}: the batch has {key}: {key in tensors.keys()}")
        except TypeError as error:
            print(VERSION, f"{first}: {type(error).__name__}: {error}")
