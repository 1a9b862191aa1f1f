"""A weight transfer that fails leaves the server paused: nothing between pause and resume cleans up."""

from types import SimpleNamespace as Bag

import torch
from trl_stub import VERSION

from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

asked = []


def broken(_weights):
    raise RuntimeError("the transfer broke")


trainer = Bag(
    model=torch.nn.Identity(),
    accelerator=Bag(
        is_main_process=True, unwrap_model=lambda model: model, wait_for_everyone=lambda: None
    ),
    weight_transfer=Bag(
        pause=lambda: asked.append("pause"),
        resume=lambda: asked.append("resume"),
        send_weights=broken,
    ),
    _streaming_iter=lambda: iter(()),
)
try:
    AsyncGRPOTrainer._sync_weight_merged(trainer, 0.0)
except RuntimeError as error:
    print(f"trl {VERSION}: {error}; the server was asked to {asked}")
