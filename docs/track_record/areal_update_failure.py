"""A load from disk that fails leaves every server paused: there is no way back but the end of the trainer."""

from types import SimpleNamespace

import areal_stub
from areal.engine import fsdp_engine

done = []


def fail():
    raise RuntimeError("no space left on device")


fsdp_engine.dist.get_rank = lambda: 0
fsdp_engine.name_resolve.add = lambda *_, **__: None
servers = SimpleNamespace(
    pause_generation=lambda: done.append("paused"),
    continue_generation=lambda: done.append("continued"),
    update_weights_from_disk=lambda meta: SimpleNamespace(result=fail),
)
names = SimpleNamespace(experiment_name="e", trial_name="t")
trainer = SimpleNamespace(
    rollout_engine=servers, tokenizer=None, processor=None, config=names, get_version=lambda: 7
)
trainer._save_model_to_hf = lambda *_: None
try:
    fsdp_engine.FSDPEngine._update_weights_from_disk(trainer, SimpleNamespace(path="/p"))
except RuntimeError as error:
    print(areal_stub.VERSION, "update_weights raised", repr(error), "- the servers were", done)
