"""R2 under a custom pipeline layout with virtual stages: routes come back under other layers, and nothing says so.

``pp_gather`` asks ``get_moe_num_layers_to_build`` how many layers each pipeline rank's chunks hold; with a ``pipeline_model_parallel_layout``
the answer is always that of the asking rank (neither verl nor Megatron's offset passes the rank on).
"""

from importlib.metadata import version
from types import SimpleNamespace

import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron_stub import MEGATRON, gathers, sizes
from verl.utils.megatron.router_replay_utils import get_moe_num_layers_to_build, pp_gather

sizes(pipeline=2, virtual_pipeline=2)
layout = PipelineParallelLayerLayout(
    "Et|ttt|ttt|tL", 2
)  # rank 0 builds layers 0 and 4-6, rank 1 builds layers 1-3 and 7
config = SimpleNamespace(
    num_layers=8,
    moe_layer_freq=1,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
)
config.pipeline_model_parallel_layout = layout
recorded = [
    torch.tensor([0, 4, 5, 6]),
    torch.tensor([1, 2, 3, 7]),
]  # one token, top-1: the expert is the layer's own number
ranks = [
    torch.nested.as_nested_tensor([layers.view(1, -1, 1).short()], layout=torch.jagged)
    for layers in recorded
]
gathers(ranks)
VERSION = f"verl {version('verl')} {MEGATRON}"
counts = [[get_moe_num_layers_to_build(config, chunk, rank) for chunk in (0, 1)] for rank in (0, 1)]
print(VERSION, "rank 0 holds [1, 3] layers, rank 1 [3, 1]; rank 0 is told", counts)
print(
    VERSION,
    "layers 0 to 7 come back as",
    pp_gather(ranks[0], config).unbind()[0].flatten().tolist(),
)
