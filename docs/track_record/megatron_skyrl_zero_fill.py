"""Rows without a route are zeros: expert 0, top-k times. Each final token and each row of padding is executed so, by fewer than top-k experts.

``_patch_alltoall_dispatcher_for_replay`` makes the dispatcher live with it. SkyRL's main branch fills with distinct ids (SkyRL#1908).
"""

import importlib.util
import sys
from importlib.metadata import version
from types import ModuleType

import torch
from megatron_stub import MEGATRON, sizes

sizes(tensor=4)
base, root = (
    "skyrl.backends.skyrl_train",
    importlib.util.find_spec("skyrl").submodule_search_locations[0],
)
for name in (
    base,
    f"{base}.distributed",
    f"{base}.distributed.megatron",
):  # the packages around it import the whole trainer
    sys.modules[name] = ModuleType(name)
for name in (f"{base}.distributed.megatron.packing_utils", f"{base}.utils.replay_utils"):
    spec = importlib.util.spec_from_file_location(
        name, f"{root}{name.removeprefix('skyrl').replace('.', '/')}.py"
    )
    sys.modules[name] = replay = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(replay)
routes = torch.tensor([[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]]).view(
    1, 5, 1, 2
)  # 4 tokens; the final one was never forwarded
rows = replay._pack_replay_indices(routes[:, :4], torch.ones(1, 4))
padded = replay._pack_replay_indices(routes, torch.ones(1, 5))
print(
    f"skyrl {version('skyrl')} {MEGATRON}",
    "4 tokens:",
    rows[0, :, 0].tolist(),
    "5 tokens, padded to 8:",
    padded[0, :, 0].tolist(),
)
