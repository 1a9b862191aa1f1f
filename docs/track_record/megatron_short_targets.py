"""Targets of too few rows or columns, or of zeros, are executed by ``RouterReplay`` as they are: rows with fewer than top-k experts, and no word.

``set_replay_data`` counts routers and looks at nothing else; ``gather`` and ``scatter`` take an index that is smaller than their input.
"""

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron_stub import MEGATRON

logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))  # 4 tokens, 8 experts, top-2
whole = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 0]])
for name, target in {
    "whole": whole,
    "3 of 4 rows": whole[:3],
    "1 of 2 columns": whole[:, :1],
    "rows of zeros": whole * 0,
}.items():
    replay = RouterReplay()
    replay.set_target_indices(target)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    _, chosen = topk_routing_with_score_function(logits, 2, router_replay=replay)
    print(MEGATRON.removeprefix("on "), name, "- experts per token", chosen.sum(1).tolist())
