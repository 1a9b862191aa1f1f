"""Faults of prime-rl, from a checkout on PYTHONPATH: `python docs/track_record/prime_rl_faults.py`.

Stubbed are packages that its modules import at their head; the environment is scripted.
"""

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import prime_rl
import torch
from common import commit_of, run, stub_packages

stub_packages(
    "vllm",
    "modelexpress",
    "grpc",
    "wandb",
    "datasets",
    "torchtitan",
    "torchdata",
    "prime_rl.transports.weights",
    even_if_installed=True,
)

import verifiers.v1 as vf
from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.orchestrator.trajectories import _encode_routed_experts
from prime_rl.orchestrator.types import Policy, Progress, TaskRequest
from prime_rl.orchestrator.watcher import WeightWatcher
from prime_rl.trainer.rl.loss import LossInputs, setup_rl_loss_fn
from prime_rl.utils.logger import setup_logger

setup_logger("critical")

VERSION = f"prime-rl {commit_of(prime_rl, parents=1)[:9]}:"


class Environment:
    """The only environment, and a source of tasks."""

    def __init__(self, run: Any) -> None:
        self.tasks: list[Any] = []
        self.run, self.sampling_args = run, {}
        self.config = SimpleNamespace(group_size=1)
        self.generation_source = SimpleNamespace(uses_live_policy=True, pool=MagicMock())

    def __iter__(self) -> Any:
        return iter([self])

    def get(self, name: str) -> Any:
        return self

    def next_task(self, step: int) -> Any:
        return self.tasks.pop(0) if self.tasks else None


def dispatcher(run: Any) -> tuple[Any, Environment]:
    """A dispatcher with one environment, which answers with ``run``."""
    environment = Environment(run)
    return Dispatcher(
        train_envs=environment,
        eval_envs=None,
        train_source=environment,
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
    ), environment


def task(name: str) -> TaskRequest:
    """A task of an ordinary taskset."""
    return TaskRequest(env_name="e", task=vf.Task(vf.TaskData(name=name)), step=1)


async def failed_run() -> None:
    """A request to an environment that fails ends the dispatcher: its own placeholder for the
    episode is refused, whatever the taskset.
    """

    async def fail(**_: Any) -> None:
        raise RuntimeError("env server request failed")

    orchestrator, environment = dispatcher(fail)
    environment.tasks.append(task("a"))
    try:
        await asyncio.wait_for(orchestrator.start(), 5)
    except ValueError as error:
        _, field, problem, *_ = str(error).splitlines()
        problem = problem.partition(" [")[0].strip()
        print(VERSION, f"Dispatcher.start ends with {type(error).__name__}: {field}: {problem}")
    print(VERSION, f"episodes that reached the sink: {orchestrator.out_q.qsize()} of 1")


def rows() -> None:
    """Surplus rows are cut, and missing ones are filled with expert 0, without a warning."""
    for count in (2, 5):
        routes = _encode_routed_experts(np.full((count, 1, 2), 9, dtype=np.uint8), 4)
        array = np.frombuffer(routes.data, routes.dtype).reshape(routes.shape)
        print(VERSION, f"{count} rows for 4 tokens become {array[:, 0].tolist()}")


async def span() -> None:
    """The watcher raises the policy version before the engines pause: a rollout that begins in
    between is tagged newer than the weights that sample it.
    """
    engine, sampled, request = SimpleNamespace(version=0), [], task("t")

    async def sample(task_data: Any, **_: Any) -> Any:
        sampled.append(engine.version)  # the first token
        episode_task = {
            "type": "T",
            "data": task_data,
            "key": request.task.key,
            "hash": request.task.hash,
        }
        return vf.WireEpisode(task=episode_task, ok=True)

    async def update(path: Any, **_: Any) -> None:
        await asyncio.sleep(0.5)  # POST /pause is in transit
        engine.version = 1

    folder, (orchestrator, environment) = Path(tempfile.mkdtemp()), dispatcher(sample)
    # its existence says that the trainer has written all of step 1
    (folder / "broadcasts/step_1/STABLE").mkdir(parents=True)
    watcher = WeightWatcher(
        SimpleNamespace(output_dir=folder),
        policy=orchestrator.policy,
        inference=SimpleNamespace(update_weights=update),
        observers=[orchestrator],
        lora_name=None,
    )
    environment.tasks.append(request)
    applied = asyncio.create_task(watcher.apply_policy_update(1))
    running = asyncio.create_task(orchestrator.start())
    policy = (await orchestrator.out_q.get()).run.work.policy
    tag = f"tagged with the span {policy.start} to {policy.end}"
    print(VERSION, f"sampled under version {sampled[0]}, {tag}")
    await asyncio.gather(applied, orchestrator.stop())
    await asyncio.wait([running])


def overflow() -> None:
    """The ratio of a token overflows; the trust region leaves it out, by a product with 0."""
    for config in (DefaultLossConfig(), IPOLossConfig()):
        current = torch.full((2,), -0.1, requires_grad=True)
        inputs = LossInputs(
            trainer_logprobs=current,
            inference_logprobs=torch.tensor([-0.1, -90.0]),
            ref_logprobs=None,
            advantages=torch.ones(2),
            loss_mask=torch.tensor([True, True]),
        )
        output = setup_rl_loss_fn(config)(inputs)
        output.loss.backward()
        print(
            VERSION,
            f"{config.type}: left out {output.metrics['is_masked'].item():.0%},",
            f"loss {output.loss.item()}, gradient {current.grad.tolist()}",
        )


if __name__ == "__main__":
    run(failed_run, rows, span, overflow)
