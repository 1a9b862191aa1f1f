"""Replay with ``remove_microbatch_padding=False`` and more than one sample in a microbatch: targets are in another order than router rows.

Megatron flattens a batch place by place (row ``s * B + b``), ``_split_replay_indices`` sample by sample. Nothing but the order differs.
"""

import importlib.util
import sys
from importlib.metadata import version
from types import ModuleType

import torch
from megatron_stub import MEGATRON, sizes

sizes()
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
tokens = torch.tensor([[0, 10, 11, 12], [0, 20, 21, 22]])
moved = replay._remove_left_padding_from_indices(
    tokens[..., None, None], (tokens > 0).int()
)  # (B, S, layers, k); "expert" = the token itself
rows = moved.transpose(
    0, 1
).flatten()  # Megatron's embedding makes it (S, B, hidden), its router flattens that
print(
    f"skyrl {version('skyrl')} {MEGATRON} router rows are tokens",
    rows.tolist(),
    "- their targets are of tokens",
    *[layer.flatten().tolist() for layer in replay._split_replay_indices(moved)],
)
