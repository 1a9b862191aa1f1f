"""An update that cannot pause one server leaves the others paused: the pause stands before the try whose end resumes."""

import asyncio
from types import SimpleNamespace as Bag

from http_stub import serve
from skyrl_stub import VERSION, Tokenizer

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch


async def main():
    asked = []
    url = serve({}, on_call=asked.append)
    dispatch = object.__new__(WorkerDispatch)
    dispatch.colocate_all, dispatch._actor_groups = False, {}
    dispatch._inference_engine_client = RemoteInferenceClient(
        url, [url, "http://127.0.0.1:9"], 1, tokenizer=Tokenizer()
    )
    engine = Bag(offload_kv_for_weight_sync=False, weight_sync_backend="nccl")
    policy = Bag(model=Bag(lora=Bag(rank=0)))
    dispatch.cfg = Bag(
        trainer=Bag(strategy="fsdp", policy=policy), generator=Bag(inference_engine=engine)
    )
    try:
        await dispatch.save_weights_for_sampler()
    except OSError as error:
        await asyncio.sleep(1)  # the other request is on its way, and nobody waits for it any more
        print(
            f"skyrl {VERSION}: one of two servers is dead: {type(error).__name__}; the other was asked {[p.split('?')[0] for p in asked]}"
        )
    await dispatch._inference_engine_client.teardown()


asyncio.run(main())
