"""verl's Megatron router replay (``router_replay_patch``, ``router_replay_utils``), called in the
order of its engine.

The order is that of ``MegatronEngineWithLMHead.forward_step`` and ``forward_backward_batch`` (verl
0.9.1, workers/engine/megatron/transformer_impl.py), which themselves need CUDA, Ray and a
checkpoint. A microbatch is one packed sequence: without Transformer Engine no attention keeps
several apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.events.replay import Action
from rollproof.core.records import IntArray, Rollout
from rollproof.core.replay_contract import ReplayMode
from rollproof.replay.megatron.replay_code import count_left

if TYPE_CHECKING:
    from rollproof.replay.megatron.rank_step import Run

__all__ = ["VerlReplay"]


class VerlReplay:
    """verl's replay code on one rank."""

    settings: Mapping[str, Any] = {"enable_routing_replay": True}

    def __init__(self) -> None:
        self._recorded: list[Any] = []

    def start(self) -> None:
        """Patch megatron-core and empty verl's list of routers, as every engine does when it is
        made.
        """
        from verl.utils.megatron.router_replay_patch import apply_router_replay_patch

        apply_router_replay_patch()

    def check(self, config: Any) -> None:
        """Check nothing, as verl does."""

    def before(self, run: Run, number: int, chunk: int) -> None:
        """Install targets, as ``forward_step`` does before it calls the model."""
        from verl.utils.megatron import router_replay_patch as patch
        from verl.utils.megatron import router_replay_utils as utils

        if number == 0 and chunk == 0 and run.step.action in (Action.REPLAY, Action.RECORD):
            # verl sets the action once a step, for all routers; later microbatches switch to and
            # fro
            action = (
                patch.RouterReplayAction.RECORD
                if run.step.action is Action.RECORD
                else patch.RouterReplayAction.REPLAY_FORWARD
            )
            patch.RouterReplay.set_global_router_replay_action(action)
        model, config = run.chunks.models[chunk], run.chunks.config
        if utils.RouterReplayHelper.is_replay_backward_action(config, chunk, model=model):
            utils.set_model_router_replay_action(model, patch.RouterReplayAction.REPLAY_FORWARD)
        if not utils.RouterReplayHelper.is_replay_forward_action(config, chunk, model=model):
            return
        samples = run.batches[number].samples
        routes, mask, ids = _routes(run, samples), None, _ids(samples)
        if run.setup.mode is ReplayMode.R3:
            routes = utils.align_r3_router_replay_data(routes, ids)
            mask = utils.build_r3_replay_mask(ids, _response_mask(samples))
        utils.set_router_replay_data(routes, None, config, chunk, replay_mask=mask, model=model)

    def after(self, run: Run, number: int, chunk: int) -> None:
        """Store recordings and switch to the backward pass, as ``forward_step`` does after the
        model.
        """
        from verl.utils.megatron import router_replay_patch as patch
        from verl.utils.megatron import router_replay_utils as utils

        model, config = run.chunks.models[chunk], run.chunks.config
        if run.step.action is Action.RECORD:
            utils.merge_router_topk_indices(
                None, _ids(run.batches[number].samples), self._recorded, config, chunk, model=model
            )
        if utils.RouterReplayHelper.is_replay_forward_action(config, chunk, model=model):
            utils.set_model_router_replay_action(model, patch.RouterReplayAction.REPLAY_BACKWARD)

    def end(self, run: Run, *, done: bool) -> None:
        """Merge recordings and clear, as ``forward_backward_batch`` does after the schedule.

        Also after a failure, where the engine has no such line and dies.
        """
        from verl.utils.megatron import router_replay_patch as patch
        from verl.utils.megatron import router_replay_utils as utils

        try:
            if done and run.step.action is Action.RECORD:
                if run.setup.vpp > 1:
                    group = run.chunks.config.microbatch_group_size_per_vp_stage
                    merged = utils.reorder_and_merge_vpp_layers(
                        self._recorded, len(run.batches), run.setup.vpp, group
                    )
                else:
                    merged = utils.merge_nested_router_maps(self._recorded)
                routes = utils.pp_gather(merged, run.chunks.config)
                # gathered by microbatch; the negative numbers are samples that only fill a
                # microbatch
                order = [number for batch in run.batches for number in batch.numbers]
                run.answer.merged.update(
                    {
                        number: rows.numpy()
                        for number, rows in zip(order, routes.unbind(), strict=True)
                        if number >= 0
                    }
                )
        finally:
            self._recorded = []
            patch.RouterReplay.clear_global_indices()
            patch.RouterReplay.clear_global_router_replay_action()

    def left(self) -> dict[str, int]:
        """Count the targets that are left in verl's own list of routers."""
        from verl.utils.megatron.router_replay_patch import RouterReplay

        return count_left(RouterReplay.router_instances)


def _nested(parts: Sequence[Any]) -> Any:
    import torch

    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def _tokens(sample: Rollout | None) -> tuple[int, ...]:
    return (0,) if sample is None else sample.prompt_ids + sample.response_ids


def _ids(samples: Sequence[Rollout | None]) -> Any:
    import torch

    return _nested([torch.tensor(_tokens(sample)) for sample in samples])


def _routes(run: Run, samples: Sequence[Rollout | None]) -> Any:
    """``routed_experts`` of a microbatch: jagged ``(rows, layers, top_k)``."""
    import torch

    shape = (1, run.batches[0].layout.columns, run.setup.top_k)
    padding: IntArray = np.broadcast_to(np.arange(run.setup.top_k, dtype=np.int16), shape)
    routes = [
        padding if sample is None or sample.routes is None else sample.routes for sample in samples
    ]
    # verl carries routes as int16.
    return _nested(
        [
            torch.from_numpy(rows.astype(np.int16) if rows.dtype.kind in "iu" else rows)
            for rows in routes
        ]
    )


def _response_mask(samples: Sequence[Rollout | None]) -> Any:
    import torch

    lengths = [0 if sample is None else len(sample.response_ids) for sample in samples]
    return torch.arange(max(1, *lengths))[None, :] < torch.tensor(lengths)[:, None]
