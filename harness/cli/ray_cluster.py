"""Work that is spread over a Ray cluster (extra ``ray``).

Tasks, not a Ray Data pipeline: a unit of work goes in as a few paths and comes out as a small sum,
so there are no blocks of rows for Ray Data to stream, and sums have to be added in their order. A
task is a function of files that do not change: Ray runs it again if its worker is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rollproof.cli.parallel import processors
from rollproof.errors import ExtraError, RollproofError, UsageError
from rollproof.store.stream import made_by

__all__ = ["Outcome", "RayCluster", "ray_cluster"]

_RETRIES = 5
"""How often a task is run again whose worker was lost."""
_AHEAD = 4
"""Tasks by processor that may wait, or be done, before the next one in order is."""
_STORE_BYTES = 128 << 20
"""The object store of a cluster that is started here: results are small."""


class Outcome(NamedTuple):
    """What became of a task: its arguments, and its result, ``None`` if all its workers died."""

    arguments: tuple[Any, ...]
    result: Any


class RayCluster:
    """A cluster that runs functions. ``processors`` are those of all its nodes."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.processors: int = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def ordered(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]
    ) -> Iterator[Outcome]:
        """Yield the outcome of each call, in the order of ``calls``.

        Raises what the function raises, and ``UsageError`` if a worker has another rollproof.
        """
        ray = self._ray
        lost = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError)
        task = ray.remote(max_retries=_RETRIES, num_cpus=1)(_run)
        source = iter(calls)
        waiting: list[tuple[tuple[Any, ...], Any]] = []
        while True:
            room = _AHEAD * self.processors - len(waiting)
            waiting += [
                (arguments, task.remote(made_by(), str(Path.cwd()), function, arguments))
                for arguments in islice(source, room)
            ]
            if not waiting:
                return
            # not ray.wait, which gives them as they finish: sums are added in order
            arguments, reference = waiting.pop(0)
            try:
                result = ray.get(reference)
            except (*lost, ray.exceptions.OutOfMemoryError):
                result = None
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RollproofError):
                    raise error.cause from None
                raise
            yield Outcome(arguments, result)


def _run(
    version: str, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Call a function on a worker, in the folder of the command."""
    if made_by() != version:
        raise UsageError(
            f"A worker of the cluster has {made_by()}, and this is {version}: install the same"
            " version on all nodes."
        )
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"A worker of the cluster does not see {folder} ({error.strerror}): run the command in"
            " a folder of a file system that all nodes mount."
        ) from None
    return function(*arguments)


@contextmanager
def ray_cluster(address: str) -> Iterator[RayCluster]:
    """Connect to the cluster at ``address``, or start one here for ``local``, until the end.

    Raises:
        ExtraError: Ray is not installed.
        UsageError: There is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise ExtraError("--ray needs Ray: pip install 'rollproof[ray]'.") from error
    # whoever connected goes on to use it: shutting it down is not ours to do
    if ray.is_initialized():
        yield RayCluster(ray)
        return
    options: dict[str, Any] = {}
    if address == "local":
        # a cluster that ends with the command reports to nobody
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {
            "num_cpus": processors(),
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
        }
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    # Ray raises these for an address that is none, where nobody answers, or of another version
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"There is no Ray cluster at {address}: {error}. --ray takes the address of a cluster"
            " (HOST:PORT, auto), or local."
        ) from error
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()
