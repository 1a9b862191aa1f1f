"""``as_dict`` fills every row that no engine captured with zeros, and says nothing: expert 0, top_k times, is a legal choice to replay."""

import numpy as np
from verl_stub import VERSION, agent_loop

routes = np.full((3, 1, 2), 9)
out = agent_loop.AgentLoopOutput(
    prompt_ids=[1, 2],
    response_ids=[3, 4, 5],
    response_mask=[1, 1, 1],
    routed_experts=routes,
    metrics={},
    extra_fields={},
)
rows = out.as_dict()["routed_experts"]
print(VERSION, "3 rows captured for 5 tokens;", "as_dict gives", rows[:, 0].tolist())
