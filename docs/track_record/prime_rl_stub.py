"""What scripts on prime-rl share: stand-ins for packages that its modules import at their head, and a dispatcher of one environment."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import prime_rl

ABSENT = (
    "vllm",
    "modelexpress",
    "grpc",
    "wandb",
    "datasets",
    "torchtitan",
    "torchdata",
    "prime_rl.transports.weights",
)


class Absent:
    """Finds a stand-in for every module of these packages."""

    def find_spec(self, name, path=None, target=None):
        return (
            ModuleSpec(name, self, is_package=True)
            if any(f"{name}.".startswith(f"{one}.") for one in ABSENT)
            else None
        )

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock()
        return module

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.insert(0, Absent())
HEAD = (
    (Path(next(iter(prime_rl.__path__))).parents[1] / ".git" / "HEAD")
    .read_text(encoding="utf-8")
    .strip()
)
VERSION = f"prime-rl {HEAD[:9]}:"  # of a checked-out commit

import verifiers.v1 as vf
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.orchestrator.types import Policy, Progress, TaskRequest
from prime_rl.utils.logger import setup_logger

setup_logger("critical")


class One:
    """A source of tasks, and the only environment."""

    def __init__(self, run):
        self.tasks, self.run, self.sampling_args = [], run, {}
        self.config = type("Config", (), {"group_size": 1})
        self.generation_source = type("Source", (), {"uses_live_policy": True, "pool": MagicMock()})

    def __iter__(self):
        return iter([self])

    def get(self, name):
        return self

    def next_task(self, step):
        return self.tasks.pop(0) if self.tasks else None


def dispatcher(run):
    """A dispatcher whose environment is ``run``, and its source of tasks."""
    one = One(run)
    made = Dispatcher(
        train_envs=one,
        eval_envs=None,
        train_source=one,
        eval_source=None,
        policy_pool=MagicMock(),
        policy=Policy(),
        progress=Progress(),
        initial_max_inflight=9,
        max_inflight_ceiling=None,
        tasks_per_minute=None,
        max_off_policy_steps=9,
        run_id="r",
        run_name=None,
    )
    return made, one


def task(name):
    """A task of an ordinary taskset."""
    return TaskRequest(env_name="e", task=vf.Task(vf.TaskData(name=name)), step=1)
