"""SkyRL's Megatron router replay (``replay_utils``), called in the order of its Megatron model
wrapper.

The order is that of ``forward_step`` in workers/megatron/megatron_model_wrapper.py and of the calls
around it in megatron_worker.py (skyrl 0.3.0), which themselves need Ray and CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.events.replay import Action
from rollproof.replay.megatron.replay_code import count_left
from rollproof.stacks.skyrl.upstream import replay_utils

if TYPE_CHECKING:
    from rollproof.replay.megatron.rank_step import Run

__all__ = ["SkyRLReplay"]


class SkyRLReplay:
    """SkyRL's replay code on one rank. A microbatch of one sample is packed, one of several is
    padded (``remove_microbatch_padding``).
    """

    settings: Mapping[str, Any] = {"moe_enable_routing_replay": True}

    def start(self) -> None:
        """Patch the routers, as the worker does before it makes its model."""
        replay_utils().patch_topk_router_layer_number()

    def check(self, config: Any) -> None:
        """Check nothing: SkyRL looks at its own settings here, not at the model."""

    def before(self, run: Run, number: int, chunk: int) -> None:
        """Install targets, as ``forward_step`` does before it calls the model."""
        if run.step.action is not Action.REPLAY:
            return
        # SkyRL records nothing itself: routes come with the batch
        routes, mask = _padded(run, number)
        replay_utils().setup_per_microbatch_replay_forward(
            routes,
            mask,
            model_config=run.chunks.config,
            remove_microbatch_padding=run.setup.microbatch_size == run.setup.dp,
        )

    def after(self, run: Run, number: int, chunk: int) -> None:
        """Switch to the backward pass, as ``forward_step`` does after the model when it trains."""
        if run.step.action is Action.REPLAY and run.step.backward:
            replay_utils().setup_per_microbatch_replay_backward()

    def end(self, run: Run, *, done: bool) -> None:
        """Clear the targets, as the worker does after the schedule.

        Also after a failure, where the worker has no such line and dies.
        """
        replay_utils().clear_router_replay()

    def left(self) -> dict[str, int]:
        """Count the targets that are left in megatron-core's list of routers."""
        from megatron.core.transformer.moe.router_replay import RouterReplay

        return count_left(RouterReplay.global_router_replay_instances)


def _padded(run: Run, number: int) -> tuple[Any, Any]:
    """``rollout_expert_indices`` ``(samples, width, layers, top_k)`` and the attention mask, padded
    on the left.

    As ``convert_prompts_responses_to_batch_tensors`` makes them: zeros where there is no row, the
    final token's included.
    """
    import torch

    batch = run.batches[number]
    width = max(batch.lengths)
    routes = np.zeros(
        (len(batch.samples), width, batch.layout.columns, run.setup.top_k), dtype=np.int32
    )
    mask = np.zeros((len(batch.samples), width), dtype=np.int64)
    for i, sample in enumerate(batch.samples):
        left = width - batch.lengths[i]
        mask[i, left:] = 1
        if sample is not None and sample.routes is not None:
            rows = sample.routes[: batch.lengths[i]]
            routes[i, left : left + len(rows)] = rows
    return torch.from_numpy(routes), torch.from_numpy(mask)
