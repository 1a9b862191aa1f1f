"""Faults of NeMo Automodel: `python docs/track_record/nemo_automodel_faults.py [NAME ...]`."""

import importlib.metadata
from typing import Any

import torch
from common import run
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import Gate
from nemo_automodel.components.moe.router_replay import RouterReplay
from torch.utils.checkpoint import checkpoint

VERSION = f"nemo-automodel {importlib.metadata.version('nemo-automodel')}:"


def recompute() -> None:
    """Routes that are replayed as ``RouterReplay`` documents it are gone in the backward pass: a
    checkpointed gate routes natively there.

    Its docstring closes the context ``replay`` before ``loss.backward()``. On leaving it, mode and
    targets are cleared.
    """
    torch.manual_seed(0)
    RouterReplay.clear_registry()  # routers of other models of this process
    gate = Gate(
        MoEConfig(
            n_routed_experts=8,
            n_activated_experts=2,
            n_expert_groups=1,
            n_limited_groups=1,
            n_shared_experts=0,
            dim=16,
            inter_dim=8,
            moe_inter_dim=8,
            train_gate=True,
            gate_bias_update_factor=0.0,
            aux_loss_coeff=0.0,
            route_scale=1.0,
            score_func="sigmoid",
            norm_topk_prob=True,
            dtype=torch.float32,
            enable_routing_replay=True,
        )
    )
    torch.nn.init.normal_(gate.weight)
    hidden, experts, matches = torch.randn(12, 16), torch.randn(8, 16), []
    routes = torch.stack([torch.randperm(8)[:2] for _ in range(12)])

    def block(rows: Any) -> Any:
        weights, ids, _ = gate(rows, torch.ones(12, dtype=torch.bool), None)
        matches.append(ids.sort(-1).values.eq(routes.sort(-1).values).all(-1).sum().item())
        return rows + (weights[..., None] * experts[ids]).sum(1)

    with RouterReplay.replay([routes]):
        loss = checkpoint(block, hidden, use_reentrant=False).square().sum()
    loss.backward()
    counts = f"forward {matches[0]}, recompute {matches[1]}"
    print(VERSION, f"rows of 12 on their target: {counts}")


if __name__ == "__main__":
    run(recompute)
