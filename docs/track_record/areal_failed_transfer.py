"""A weight transfer that broke is logged as completed: generation goes on, and the trainer numbers the old weights anew."""

from types import SimpleNamespace

import areal_stub
from areal.experimental.training_service.controller.controller import GatewayTrainController
from areal.experimental.weight_update.controller.controller import WeightUpdateController

done = []
said = {
    "status": "error",
    "version": 8,
    "duration_ms": 1.0,
    "error": "connection reset",
}  # what the gateway answers, with status 200
http = SimpleNamespace(
    post=lambda *_, **__: SimpleNamespace(raise_for_status=lambda: None, json=lambda: said)
)
updates = WeightUpdateController()
updates._http_client, updates._pair_name = http, "actor-rollout"
type(updates)._http = property(lambda self: http)
rollout = SimpleNamespace(
    pause_generation=lambda: done.append("paused"),
    continue_generation=lambda: done.append("continued"),
)
trainer = SimpleNamespace(_weight_update_ctrl=updates, rollout=rollout)
returned = GatewayTrainController.update_weights(trainer, SimpleNamespace(version=8))
print(
    areal_stub.VERSION,
    "the gateway says",
    said["status"],
    "- update_weights did",
    done,
    "and returned",
    returned,
)
