"""R3 with fewer routes than tokens: ``as_dict`` fills up with zeros, and the replay mask replays them: expert 0 for every such token.

``align_r3_router_replay_data`` refuses more than one missing row, but never sees one: ``as_dict`` made the rows equal to the tokens. The mask leaves
the last row native, not the filled ones.
"""

from importlib.metadata import version

import torch
from megatron_stub import MEGATRON
from verl.utils.megatron import router_replay_patch as patch
from verl.utils.megatron.router_replay_utils import (
    align_r3_router_replay_data,
    build_r3_replay_mask,
)

captured = torch.tensor([[1, 2], [3, 4], [5, 6]])
filled = torch.cat(
    [captured, torch.zeros(3, 2, dtype=torch.long)]
)  # AgentLoopOutput.as_dict: see verl_zero_rows.py
ids = torch.nested.as_nested_tensor([torch.arange(6)], layout=torch.jagged)
routes = align_r3_router_replay_data(
    torch.nested.as_nested_tensor([filled[:, None]], layout=torch.jagged), ids
)
mask = build_r3_replay_mask(ids, torch.ones(1, 4))
replay = patch.RouterReplay()
replay.set_target_indices(routes.values()[:, 0], replay_mask=mask.values())
replay.set_router_replay_action(patch.RouterReplayAction.REPLAY_FORWARD)
scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
chosen = replay.get_replay_topk(
    scores, 2, default_compute_topk=lambda scores, k, **_: torch.topk(scores, k)
)[1]
print(
    f"verl {version('verl')} {MEGATRON}", "3 rows captured for 6 tokens; executed", chosen.tolist()
)
