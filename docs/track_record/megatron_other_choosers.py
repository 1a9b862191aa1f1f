"""Routers that choose by sinkhorn take targets and execute others: replay is neither done nor refused.

``TopKRouter.routing`` asks ``RouterReplay`` on one of its two paths.
"""

from types import MethodType, SimpleNamespace

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron_stub import MEGATRON

config = SimpleNamespace(
    num_moe_experts=8,
    moe_aux_loss_coeff=0,
    moe_z_loss_coeff=None,
    moe_expert_capacity_factor=None,
    moe_router_fusion=False,
)
router = SimpleNamespace(
    config=config,
    routing_type="sinkhorn",
    topk=2,
    training=False,
    enable_expert_bias=False,
    router_replay=RouterReplay(),
)
router.sinkhorn_load_balancing = MethodType(TopKRouter.sinkhorn_load_balancing, router)
router.apply_z_loss, router.is_aux_loss_enabled = (lambda logits, **_: logits), (lambda: False)
router._apply_expert_bias = lambda *_, **__: None
router.router_replay.set_target_indices(torch.tensor([[0, 1]]))
router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
_, chosen = TopKRouter.routing(router, torch.arange(8.0).view(1, 1, 8))
print(MEGATRON.removeprefix("on "), "target [0, 1], executed", chosen.nonzero()[:, 1].tolist())
