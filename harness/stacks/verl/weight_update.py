"""verl's weight update, ``CheckpointEngineManager.update_weights``, driving the servers while its
client runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollproof.fakes.engine.exceptions import EngineFailure
from rollproof.fakes.engine.ray_handles import RayHandle
from rollproof.stacks.verl.resume_client import ClientSubject
from rollproof.stacks.verl.rollout_servers import VerlServer
from rollproof.stacks.verl.upstream import Verl

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["CheckpointSubject"]

_BACKEND = "rollproof"


class CheckpointSubject(ClientSubject):
    """The client part, with weights that arrive through verl's own checkpoint engine manager and
    its ``RolloutReplica``.

    The trainer and the rollout workers below are ours, without processes. ``ray.get`` blocks the
    trainer's loop in verl, so the transfer takes no time here. As verl's adapters do, a worker
    publishes the step to its server only if there is one.
    """

    def __init__(self, verl: Verl) -> None:
        super().__init__(verl)
        _without_ray(verl.checkpoint)

    def start(self, fleet: Fleet) -> None:
        """Make the servers, and a manager with a replica of each."""
        super().start(fleet)
        base = self._verl.checkpoint
        replicas = [
            _replica(base.RolloutReplica, server, fleet) for server in self._host.servers.values()
        ]
        # The backend is the one that `_without_ray` registers: verl looks it up by name.
        config = SimpleNamespace(backend=_BACKEND, custom_backend_module=None)
        self._manager = base.CheckpointEngineManager(config, _WorkerGroup(), replicas)

    async def update_weights(self, version: int | None) -> None:
        """Update by verl's procedure. Raises what it raises."""
        for server in self._host.servers.values():
            server.note_steps()
        await self._manager.update_weights(version)


class _Worker:
    """The rollout side of a transfer to an engine."""

    def __init__(self, server: VerlServer, fleet: Fleet) -> None:
        self._engine = server.engine
        self._fleet = fleet

    # A worker of verl does this in a process of its own, on every GPU of the replica.
    def load(self, step: int | None) -> None:
        """Load the trainer's weights, and publish their step if there is one."""
        version = self._fleet.weights_of(step)
        self._engine.load_now(version, step, identity=version == self._engine.version)


class _WorkerGroup:
    """verl's ``RayWorkerGroup``, as far as the manager calls it; without workers, the trainer's."""

    def __init__(self, workers: Sequence[_Worker] = ()) -> None:
        self._workers = tuple(workers)
        self.world_size = max(1, len(self._workers))

    def execute_checkpoint_engine(
        self, method: Sequence[str], **_arguments: Any
    ) -> list[dict[str, Any]]:
        """Do nothing to prepare, to build the process group, and to finalize."""
        return [{} for _ in method]

    def update_weights(
        self, global_steps: int | None = None, mode: str | None = None
    ) -> list[dict[str, Any]]:
        """Load on every worker. Raises what the first one raised, after all had their turn."""
        errors: list[EngineFailure] = []
        for worker in self._workers:
            # workers are processes of their own: one that fails does not stop the others
            try:
                worker.load(global_steps)
            except EngineFailure as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return [{} for _ in range(self.world_size)]


def _replica(base: Any, server: VerlServer, fleet: Fleet) -> Any:
    """A ``RolloutReplica`` of a server, with the fields that its control methods read."""

    class Replica(base):  # type: ignore[misc]  # the base is verl's, known at run time only
        def __init__(self) -> None:
            self.servers = [RayHandle(server)]
            self.workers = [_Worker(server, fleet)]

        # abstract in verl, and called by nobody here: the fleet starts its servers itself
        async def launch_servers(self) -> None:
            raise NotImplementedError("the fleet's servers run already")

    return Replica()


def _without_ray(base: Any) -> None:
    """Replace Ray in verl's module, which gets results and makes worker groups with it. The
    replacements stay for the process.
    """

    def group(*, worker_handles: Sequence[_Worker], **_options: Any) -> _WorkerGroup:
        return _WorkerGroup(worker_handles)

    # Stand-ins for what would start processes: verl only calls `ray.get` on results, and makes
    # worker groups from handles.
    base.ray = SimpleNamespace(get=lambda results: results)
    base.RayWorkerGroup = group
    base.RayClassWithInitArgs = lambda **_options: None
    base.CheckpointEngineRegistry.register(_BACKEND)(_Topology)


class _Topology:
    """The process group of a checkpoint engine, which is not needed."""

    @classmethod
    def build_topology(cls, *_sizes: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no arguments for either side."""
        return {}, {}
