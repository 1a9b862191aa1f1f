"""R2 under tensor parallelism: rows that pad a sequence to a multiple of the ranks are replayed as zeros, expert 0 for every k.

``preprocess_thd_engine`` pads routes with zeros; a mask that leaves such rows to the router is made for R3 alone (transformer_impl.py, 1315).
"""

from importlib.metadata import version
from types import SimpleNamespace

import torch
from megatron_stub import MEGATRON, sizes
from verl.utils.megatron import router_replay_patch as patch
from verl.utils.megatron import router_replay_utils as utils

sizes(tensor=2)
utils.device_name, utils.scatter_to_sequence_parallel_region = (
    "cpu",
    lambda rows: rows,
)  # no GPU; the rows of both tensor-parallel ranks
sizes_of = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
config = SimpleNamespace(fp8=None, num_layers=1, moe_layer_freq=1, **sizes_of)
stages = dict.fromkeys(
    (
        "pipeline_model_parallel_layout",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    )
)
vars(config).update(
    stages, account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False
)
recorded = torch.nested.as_nested_tensor(
    [torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]])], layout=torch.jagged
)  # 3 tokens: 4 rows
utils.RouterReplay.router_instances[:] = []  # other models of this process
router = utils.RouterReplay()
utils.set_router_replay_data(recorded, None, config)  # as in R2: no mask
router.set_router_replay_action(patch.RouterReplayAction.REPLAY_FORWARD)
chosen = router.get_replay_topk(
    torch.rand(4, 8), 2, default_compute_topk=lambda scores, k, **_: torch.topk(scores, k)
)[1]
print(f"verl {version('verl')} {MEGATRON}", "3 tokens, padded to 4 rows, execute", chosen.tolist())
