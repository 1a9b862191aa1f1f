"""R3 routes of one layer too few are read as if dense layers had been left out: MoE layers get the columns of others.

``set_router_replay_data`` tells the two conventions apart by length alone: num_layers columns are all layers, any other number is
MoE layers. Here the engine's layer 0 is dense (zeros), the last column is missing.
"""

from importlib.metadata import version
from types import SimpleNamespace

import torch
from megatron_stub import MEGATRON, sizes
from verl.utils.megatron import router_replay_utils as utils

sizes()
utils.device_name, utils.scatter_to_sequence_parallel_region = (
    "cpu",
    lambda rows: rows,
)  # no GPU, one tensor-parallel rank
config = SimpleNamespace(
    fp8=None,
    num_layers=4,
    moe_layer_freq=[0, 1, 1, 1],
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
)
routers = [SimpleNamespace(number=number, router=utils.RouterReplay()) for number in (2, 3, 4)]
utils.iter_model_routers = lambda model: [(one.number, one.router) for one in routers]
columns = torch.tensor(
    [0, 11, 22, 33]
)  # "expert" = the layer's own number, twice; layer 0 has none
for given in (columns, columns[:3]):
    utils.set_router_replay_data(
        torch.nested.as_nested_tensor([given.view(1, -1, 1)], layout=torch.jagged),
        None,
        config,
        model=object(),
    )
    got = [one.router.target_topk_idx.item() for one in routers]
    print(
        f"verl {version('verl')} {MEGATRON}", f"columns {given.tolist()}: layers 1, 2, 3 get {got}"
    )
