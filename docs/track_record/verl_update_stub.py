"""Stand-ins for Ray, a trainer and rollout workers below verl's ``CheckpointEngineManager``; its order of steps is verl's own."""

import asyncio
from types import SimpleNamespace as Box

import verl.checkpoint_engine.base as base

base.ray, base.RayClassWithInitArgs = Box(get=lambda value: value), lambda **_: None
base.RayWorkerGroup = lambda worker_handles, **_: Group(worker_handles)
base.CheckpointEngineRegistry._registry["none"] = Box(build_topology=lambda *_: ({}, {}))


class Group:
    """A worker group; a rollout worker tells its server the step only where there is one, as verl's adapters do."""

    def __init__(self, replicas=(), fails=False):
        self.replicas, self.fails, self.world_size = replicas, fails, max(len(replicas), 1)

    def execute_checkpoint_engine(self, method, **_):
        return [{}] * self.world_size

    def update_weights(self, global_steps=None, mode=None):
        if self.fails:
            raise RuntimeError("transfer failed")
        for replica in self.replicas:
            replica.loaded.append("paused" if replica.paused else "SERVING")
            replica.step = replica.step if global_steps is None else global_steps
        return [{}] * self.world_size


class Replica:
    """Keeps what it was told; each of its methods takes the next of ``seconds``, else 10 ms."""

    def __init__(self, *seconds):
        self.step, self.loaded, self.paused, self.kv, self.workers, self.seconds = (
            1,
            [],
            False,
            True,
            [self],
            list(seconds),
        )

    async def _set(self, name, value):
        setattr(self, name, value)
        await asyncio.sleep(self.seconds.pop(0) if self.seconds else 0.01)

    async def abort_all_requests(self, reject_request=False):
        await self._set("paused", True)

    async def resume_generation(self):
        await self._set("paused", False)

    async def release_kv_cache(self):
        await self._set("kv", False)

    async def resume_kv_cache(self):
        await self._set("kv", True)


def manager(*seconds, fails=False):
    replica = Replica(*seconds)
    return base.CheckpointEngineManager(
        Box(backend="none", custom_backend_module=None), Group(fails=fails), [replica]
    ), replica
