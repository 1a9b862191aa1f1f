"""vLLM forgets no cache while a call holds blocks, and says so; NeMo-RL does not look, and reports the cache as invalidated."""

import asyncio
from types import SimpleNamespace

from nemo_rl_stub import VERSION, say, worker

from nemo_rl.models.generation.vllm import vllm_generation


async def refused():
    """AsyncLLM.reset_prefix_cache beside a running call (vllm/v1/core/block_pool.py)."""
    return False


held = worker(SimpleNamespace(reset_prefix_cache=refused))
generation = object.__new__(vllm_generation.VllmGeneration)
generation.shutdown = lambda: True
generation.cfg = held.cfg
generation.worker_group = SimpleNamespace(
    run_all_workers_single_data=lambda name, **_: [getattr(held, name)()]
)
vllm_generation.ray.get = lambda calls: [asyncio.run(call) for call in calls]
say(
    f"nemo-rl {VERSION}: vLLM reset its cache: {asyncio.run(refused())}; invalidate_kv_cache: {generation.invalidate_kv_cache()}"
)
