"""The replay code of a trainer, as one rank drives it around Megatron's schedule.

Here is megatron-core's own. That of verl and SkyRL is in ``rollproof.stacks``, and imported if a
setup names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollproof.core.events.replay import Action
from rollproof.core.records import IntArray
from rollproof.core.replay_contract import Recompute
from rollproof.errors import RouterError
from rollproof.replay.megatron.megatron_setups import MegatronSetup, ReplayCodeName
from rollproof.replay.megatron.rank_step import ReplayCode, Run

__all__ = ["CoreReplay", "replay_code"]


def replay_code(setup: MegatronSetup) -> ReplayCode:
    """Return the replay code of a setup."""
    module, name = {
        ReplayCodeName.CORE: ("rollproof.replay.megatron.replay_code", "CoreReplay"),
        ReplayCodeName.VERL: ("rollproof.stacks.verl.megatron_replay", "VerlReplay"),
        ReplayCodeName.SKYRL: ("rollproof.stacks.skyrl.megatron_replay", "SkyRLReplay"),
    }[setup.code]
    made: ReplayCode = getattr(importlib.import_module(module), name)()
    return made


class CoreReplay:
    """megatron-core's ``RouterReplay``, driven as docs/replay-megatron.md says.

    Before a microbatch's forward pass every router of the chunk gets its target and the action
    REPLAY_FORWARD; after it, if activations are recomputed, REPLAY_BACKWARD. When the step ends,
    also by a failure, targets, queues and actions are cleared.
    """

    settings: Mapping[str, Any] = {"moe_enable_routing_replay": True}

    def start(self) -> None:
        """Nothing to do: the code is megatron-core's."""

    def check(self, config: Any) -> None:
        """Raise ``RouterError`` for routers that do not choose in ``RouterReplay`` alone."""
        reasons = {
            "moe_router_load_balancing_type='sinkhorn' selects without RouterReplay": (
                config.moe_router_load_balancing_type == "sinkhorn"
            ),
            "moe_expert_capacity_factor drops tokens after the selection": (
                config.moe_expert_capacity_factor is not None
            ),
            "moe_router_fusion selects in a fused kernel without RouterReplay": (
                config.moe_router_fusion
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise RouterError(
                    f"Routes cannot be replayed by this router: {reason}. Change that setting, or"
                    " switch replay off."
                )

    def before(self, run: Run, number: int, chunk: int) -> None:
        """Install targets, or record."""
        import torch

        if run.step.action is Action.REPLAY:
            targets = self._targets(run, number, chunk)
            for layer, router in run.chunks.routers[chunk].items():
                # this also appends the target to the queue of the backward pass
                router.router_replay.set_target_indices(torch.from_numpy(targets[layer]))
                run.spy.installed(layer, microbatch=number)
            _act(run, "REPLAY_FORWARD", chunk)
        elif run.step.action is Action.RECORD:
            _act(run, "RECORD", chunk)

    def after(self, run: Run, number: int, chunk: int) -> None:
        """Store what was recorded; switch to the queue of the backward pass."""
        if run.step.action is Action.RECORD:
            run.answer.recorded[number, chunk] = {
                # copied: with CUDA graphs, release 0.19.2 records into a buffer that the next
                # forward overwrites
                layer: router.router_replay.get_recorded_indices().cpu().numpy().copy()
                for layer, router in run.chunks.routers[chunk].items()
            }
        elif (
            run.step.action is Action.REPLAY
            and run.step.backward
            and run.step.recompute is not Recompute.NONE
        ):
            # under REPLAY_FORWARD a recompute would execute the target that was installed last,
            # which in a pipeline is of a later microbatch
            _act(run, "REPLAY_BACKWARD", chunk)

    def end(self, run: Run, *, done: bool) -> None:
        """Clear everything."""
        # without recompute the schedule never empties the queues
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()

    def left(self) -> dict[str, int]:
        """Count targets, recordings, queued targets and actions of all routers of the process."""
        from megatron.core.transformer.moe.router_replay import RouterReplay

        return count_left(RouterReplay.global_router_replay_instances)

    def _targets(self, run: Run, number: int, chunk: int) -> Mapping[int, IntArray]:
        """Return ``{layer: (rows, top_k)}`` for the routers of a chunk; padding gets a filler."""
        if run.in_place is not None:
            return run.in_place[number, chunk]
        batch = run.batches[number]
        empty = np.zeros((0, batch.layout.columns, run.setup.top_k), dtype=np.int64)
        payloads = [
            empty if sample is None or sample.routes is None else sample.routes
            for sample in batch.samples
        ]
        return batch.layout.targets(payloads, run.rank, chunk, lengths=batch.lengths)


def count_left(places: Any) -> dict[str, int]:
    """Count what is left in instances of a ``RouterReplay`` class, or of a copy of it."""
    return {
        "targets": sum(place.target_topk_idx is not None for place in places),
        "recordings": sum(place.recorded_topk_idx is not None for place in places),
        "queued targets": sum(len(place.replay_backward_list) for place in places),
        "actions": sum(place.router_replay_action is not None for place in places),
    }


def _act(run: Run, action: str, chunk: int) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for router in run.chunks.routers[chunk].values():
        router.router_replay.set_router_replay_action(RouterReplayAction[action])
