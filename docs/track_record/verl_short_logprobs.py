"""Missing logprobs are filled with 0.0 under a loss mask of 1: the trainer reads a probability of 1."""

import asyncio

from verl_stub import VERSION, agent_loop, batch

out = agent_loop.AgentLoopOutput(
    prompt_ids=[1, 2],
    response_ids=[3, 4, 5],
    response_mask=[1, 1, 1],
    response_logprobs=[-1.5],
    metrics={},
    extra_fields={},
)
tensors = asyncio.run(batch([out])).batch
print(
    VERSION,
    "1 logprob for 3 tokens; rollout_log_probs",
    tensors["rollout_log_probs"][0, :3].tolist(),
    "mask",
    tensors["response_mask"][0, :3].tolist(),
)
