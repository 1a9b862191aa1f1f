"""CheckpointEngineManager.update_weights: an update without a step, one that fails in the middle, and one that overtakes another."""

import asyncio
from types import SimpleNamespace as Box

import verl.checkpoint_engine.base as base
from verl_stub import VERSION

base.ray, base.RayClassWithInitArgs = Box(get=lambda value: value), lambda **_: None
base.RayWorkerGroup = lambda worker_handles, **_: Group(worker_handles)
base.CheckpointEngineRegistry._registry["none"] = Box(build_topology=lambda *_: ({}, {}))


class Group:
    """A worker group: the rollout side loads, and tells the server its step only if there is one (as verl's adapters do)."""

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
    def __init__(self):
        self.step, self.loaded, self.paused, self.kv, self.workers = 1, [], False, True, [self]

    async def _set(self, name, value):
        setattr(self, name, value)
        await asyncio.sleep(0.01)

    abort_all_requests = lambda self, reject_request=False: self._set("paused", True)  # noqa: E731
    resume_generation = lambda self: self._set("paused", False)  # noqa: E731
    release_kv_cache = lambda self: self._set("kv", False)  # noqa: E731
    resume_kv_cache = lambda self: self._set("kv", True)  # noqa: E731


def manager(fails=False):
    replica = Replica()
    return base.CheckpointEngineManager(Box(backend="none", custom_backend_module=None), Group(fails=fails), [replica]), replica


async def main():
    engine, replica = manager()
    await engine.update_weights()
    print(VERSION, "update_weights(): weights loaded", len(replica.loaded), "time; the server still tags with step", replica.step)
    engine, replica = manager(fails=True)
    try:
        await engine.update_weights(2)
    except RuntimeError as error:
        print(VERSION, f"after {error!r}: replica paused {replica.paused}, KV cache there {replica.kv}")
    engine, replica = manager()
    first = asyncio.create_task(engine.update_weights(2))
    await asyncio.sleep(0.025)  # the first one is giving the KV cache back
    await asyncio.gather(first, engine.update_weights(3))
    print(VERSION, "two updates, the second started before the first ended: weights loaded while the replica was", replica.loaded)


asyncio.run(main())
