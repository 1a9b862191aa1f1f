"""Replay with ``use_remove_padding=False``: the model is fed a padded batch, its routers are given targets in packed order.

Megatron flattens a batch place by place (row ``s * B + b``); ``set_router_replay_data`` packs whatever it is given. Where two sequences are of
one length nothing but the order differs. Nothing refuses the combination on Megatron; for VeOmni verl's configuration does.
"""

from importlib.metadata import version
from types import SimpleNamespace

import torch
from megatron_stub import MEGATRON, sizes
from verl.models.mcore.util import preprocess_bshd_engine
from verl.utils.megatron import router_replay_utils as utils

sizes()
utils.device_name, utils.scatter_to_sequence_parallel_region = (
    "cpu",
    lambda rows: rows,
)  # no GPU, one tensor-parallel rank
tokens = torch.nested.as_nested_tensor(
    [torch.tensor([10, 11, 12]), torch.tensor([20, 21, 22])], layout=torch.jagged
)
batch = preprocess_bshd_engine(tokens)[
    0
]  # (B, S), what the engine feeds where use_remove_padding is False
rows = batch.transpose(
    0, 1
).flatten()  # Megatron's embedding makes it (S, B, hidden), its router flattens that
routes = torch.nested.as_nested_tensor(
    [part.view(-1, 1, 1) for part in tokens.unbind()], layout=torch.jagged
)  # "expert" = the token itself
config = SimpleNamespace(
    fp8=None,
    num_layers=1,
    moe_layer_freq=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
)
config.pipeline_model_parallel_layout = config.num_layers_in_first_pipeline_stage = (
    config.num_layers_in_last_pipeline_stage
) = None
config.account_for_embedding_in_pipeline_split = config.account_for_loss_in_pipeline_split = False
utils.RouterReplay.router_instances[:] = []  # other models of this process
router = utils.RouterReplay()
utils.set_router_replay_data(routes, None, config)
VERSION = f"verl {version('verl')} {MEGATRON}"
print(
    VERSION,
    "router rows are tokens",
    rows.tolist(),
    "- their targets are of tokens",
    router.target_topk_idx.flatten().tolist(),
)
