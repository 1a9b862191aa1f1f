"""R2 recordings of expert ids above 255: verl 0.8.0 keeps them in eight bits, so that expert 256 is replayed as expert 0."""

from importlib.metadata import version
from types import SimpleNamespace

import torch
from megatron_stub import MEGATRON, sizes
from verl.utils.megatron import router_replay_utils as utils

sizes()
utils.device_name, utils.gather_from_sequence_parallel_region = (
    "cpu",
    lambda rows, **_: rows,
)  # no GPU, one tensor-parallel rank
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
utils.RouterReplay.router_instances[:] = []
utils.RouterReplay().record_indices(torch.tensor([[255, 256], [383, 1]]))
handed = []
ids = torch.nested.as_nested_tensor([torch.arange(2)], layout=torch.jagged)
utils.merge_router_topk_indices(None, ids, handed, config, 0)
print(
    f"verl {version('verl')} {MEGATRON}",
    "chosen [[255, 256], [383, 1]], recorded",
    handed[0].unbind()[0][:, 0].tolist(),
)
