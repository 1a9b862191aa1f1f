"""Whether a batch has routes and logprobs is decided by its first sample; lengths are looked at of the loss mask alone."""

import numpy as np
from miles_stub import VERSION, train_data

from miles.utils.types import Sample


def sample(**fields):
    return Sample(tokens=[1, 2, 3, 4], response_length=2, reward=0.0, **fields)


routes = np.ones((3, 1, 1), dtype=np.int32)
data = train_data([sample(), sample(rollout_routed_experts=routes, rollout_log_probs=[-0.1, -0.2])])
print(
    f"miles {VERSION}: the first of two samples has neither: {sorted(set(data) & {'rollout_routed_experts', 'rollout_log_probs'})}"
)
data = train_data(
    [sample(rollout_routed_experts=np.ones((9, 1, 1), dtype=np.int32), rollout_log_probs=[-0.1])]
)
print(
    f"miles {VERSION}: 1 logprob and {len(data['rollout_routed_experts'][0])} rows for 2 + 2 tokens are taken"
)
