"""SkyRL's Megatron router replay (``replay_utils``), called in the order of its Megatron model
wrapper.

The order is that of ``forward_step`` in workers/megatron/megatron_model_wrapper.py and of the calls
around it in megatron_worker.py (skyrl 0.3.0), which themselves need Ray and CUDA. ``replay_utils``
is loaded without the packages around it, whose imports need the whole of SkyRL.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.events.replay import Action
from rollproof.errors import StackError
from rollproof.replay.megatron.replay_code import count_left
from rollproof.stacks._support.importing import standing_in

if TYPE_CHECKING:
    from rollproof.replay.megatron.rank_worker import Run

__all__ = ["SkyRLReplay", "replay_utils"]

_MODULE = "skyrl.backends.skyrl_train.utils.replay_utils"


def replay_utils() -> ModuleType:
    """SkyRL's module. Raises ``StackError`` where no released package holds it."""
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    found = importlib.util.find_spec("skyrl")
    if found is None or not found.submodule_search_locations:
        raise StackError(
            "skyrl is not installed. Install its released package without what it depends on: `pip"
            " install --no-deps skyrl==0.3.0`."
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    if not (folder / "backends" / "skyrl_train" / "utils" / "replay_utils.py").is_file():
        raise StackError(
            "The installed skyrl has no backends/skyrl_train/utils/replay_utils.py; `pip install"
            " --no-deps skyrl==0.3.0` has it."
        )
    parts = _MODULE.split(".")[1:-1]
    inner = [parts[:depth] for depth in range(len(parts) + 1)]
    inner += [[*parts[:2], "distributed"], [*parts[:2], "distributed", "megatron"]]
    packages: dict[str, ModuleType] = {}
    for names in inner:
        packages[".".join(["skyrl", *names])] = package = ModuleType(".".join(["skyrl", *names]))
        package.__path__ = [str(folder.joinpath(*names))]
    with standing_in(packages):
        return importlib.import_module(_MODULE)


class SkyRLReplay:
    """SkyRL's replay code on one rank. One sample to a microbatch is packed, several are padded
    (``remove_microbatch_padding``).
    """

    settings: Mapping[str, Any] = {"moe_enable_routing_replay": True}

    def start(self) -> None:
        """What the worker does before it makes its model."""
        replay_utils().patch_topk_router_layer_number()

    def check(self, config: Any) -> None:
        """SkyRL looks at its own settings here, at nothing of the model."""

    def before(self, run: Run, number: int, chunk: int) -> None:
        """What ``forward_step`` does before the model is called."""
        if run.step.action is not Action.REPLAY:
            return
        routes, mask = _padded(run, number)
        replay_utils().setup_per_microbatch_replay_forward(
            routes,
            mask,
            model_config=run.chunks.config,
            remove_microbatch_padding=run.setup.microbatch_size == run.setup.dp,
        )

    def after(self, run: Run, number: int, chunk: int) -> None:
        """What ``forward_step`` does behind the model, where it trains."""
        if run.step.action is Action.REPLAY and run.step.backward:
            replay_utils().setup_per_microbatch_replay_backward()

    def end(self, run: Run, *, done: bool) -> None:
        """What the worker does behind the schedule, also where it failed: there the worker has no
        such line, and dies.
        """
        replay_utils().clear_router_replay()

    def left(self) -> dict[str, int]:
        """What is left in megatron-core's list of routers."""
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
