"""Rows that are too many are cut, and too few are filled up with expert 0, in silence."""

import numpy as np
from prime_rl_stub import VERSION
from prime_rl.orchestrator.trajectories import _encode_routed_experts

for rows in (2, 5):
    made = _encode_routed_experts(np.full((rows, 1, 2), 9, dtype=np.uint8), 4)
    print(
        VERSION,
        f"{rows} rows for 4 tokens become {np.frombuffer(made.data, made.dtype).reshape(made.shape)[:, 0].tolist()}",
    )
