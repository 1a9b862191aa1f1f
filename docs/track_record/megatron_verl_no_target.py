"""REPLAY_FORWARD without a target, and REPLAY_BACKWARD with an empty queue: verl's ``RouterReplay`` lets the router choose, and says nothing.

megatron-core's own class raises in both cases. A target that reached another router (verl#7340) is then a replay that never happens.
"""

from importlib.metadata import version

import torch
from megatron.core.transformer.moe import router_replay as core
from megatron_stub import MEGATRON
from verl.utils.megatron import router_replay_patch as verl

logits = torch.arange(8.0).view(1, 8)
for action in ("REPLAY_FORWARD", "REPLAY_BACKWARD"):
    said = []
    for module in (verl, core):
        replay = module.RouterReplay()
        replay.set_router_replay_action(module.RouterReplayAction[action])
        try:
            said.append(
                replay.get_replay_topk(
                    logits,
                    2,
                    default_compute_topk=lambda scores, k, *_, **__: torch.topk(scores, k),
                )[1].tolist()
            )
        except (AttributeError, IndexError) as error:
            said.append(type(error).__name__)
    print(
        f"verl {version('verl')} {MEGATRON}",
        f"{action} without a target: verl's chooses {said[0]}, megatron-core's raises {said[1]}",
    )
