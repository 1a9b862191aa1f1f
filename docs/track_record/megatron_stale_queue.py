"""A forward-only pass that replays leaves its targets queued: the next step's recompute executes them, unless its caller cleared them.

``set_target_indices`` queues every target for a backward pass, also where there will be none.
"""

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron_stub import MEGATRON

logits, replay = torch.zeros(1, 8), RouterReplay()


def executed(action):
    replay.set_router_replay_action(action)
    return (
        topk_routing_with_score_function(logits, 2, router_replay=replay)[1]
        .nonzero()[:, 1]
        .tolist()
    )


replay.set_target_indices(torch.tensor([[0, 1]]))  # old logprobs, forward only
executed(RouterReplayAction.REPLAY_FORWARD)
replay.set_target_indices(torch.tensor([[6, 7]]))  # training, with recompute
forward = executed(RouterReplayAction.REPLAY_FORWARD)
print(
    MEGATRON.removeprefix("on "),
    "forward pass",
    forward,
    "its recompute",
    executed(RouterReplayAction.REPLAY_BACKWARD),
)
