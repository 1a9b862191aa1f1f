"""Routes that are replayed as ``RouterReplay`` documents it are gone in the backward pass: a checkpointed gate routes natively there.

Its docstring closes the context ``replay`` before ``loss.backward()``. On leaving it, mode and targets are cleared.
"""

import importlib.metadata

import torch
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import Gate
from nemo_automodel.components.moe.router_replay import RouterReplay
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
sizes = {
    "n_routed_experts": 8,
    "n_activated_experts": 2,
    "n_expert_groups": 1,
    "n_limited_groups": 1,
    "n_shared_experts": 0,
    "dim": 16,
}
RouterReplay.clear_registry()  # other models of this process
rest = {
    "inter_dim": 8,
    "moe_inter_dim": 8,
    "train_gate": True,
    "gate_bias_update_factor": 0.0,
    "aux_loss_coeff": 0.0,
    "route_scale": 1.0,
}
gate = Gate(
    MoEConfig(
        **sizes,
        **rest,
        score_func="sigmoid",
        norm_topk_prob=True,
        dtype=torch.float32,
        enable_routing_replay=True,
    )
)
torch.nn.init.normal_(gate.weight)
hidden, experts, chosen = torch.randn(12, 16), torch.randn(8, 16), []
routes = torch.stack([torch.randperm(8)[:2] for _ in range(12)])


def block(rows):
    weights, ids, _ = gate(rows, torch.ones(12, dtype=torch.bool), None)
    chosen.append(ids.sort(-1).values.eq(routes.sort(-1).values).all(-1).sum().item())
    return rows + (weights[..., None] * experts[ids]).sum(1)


with RouterReplay.replay([routes]):
    loss = checkpoint(block, hidden, use_reentrant=False).square().sum()
loss.backward()
print(
    f"nemo-automodel {importlib.metadata.version('nemo-automodel')}: rows of 12 on their target: forward {chosen[0]}, recompute {chosen[1]}"
)
