"""Route rows, logprobs and masks of the wrong length are cut or padded in silence on the way into a batch."""

import numpy as np
from verl_stub import VERSION, agent_loop

out = agent_loop.AgentLoopOutput(
    prompt_ids=[1, 2],
    response_ids=[3, 4],
    response_mask=[1, 1, 1],
    response_logprobs=[-1.0],
    routed_experts=np.arange(7)[:, None, None],
    metrics={},
    extra_fields={},
)
fields = {
    name: list(value.shape) for name, value in out.as_dict().items() if hasattr(value, "shape")
}
print(VERSION, "2 + 2 tokens with 3 mask entries, 1 logprob, 7 rows:", fields)
