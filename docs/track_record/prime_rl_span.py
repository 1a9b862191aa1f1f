"""The watcher raises the policy version before the engines pause: a rollout that begins in between is tagged newer than what samples it."""

import asyncio
import pathlib
import tempfile
from types import SimpleNamespace

from prime_rl_stub import VERSION, dispatcher, task, vf
from prime_rl.orchestrator.watcher import WeightWatcher

engine, sampled = SimpleNamespace(version=0), []


async def run(task_data, **_):
    sampled.append(engine.version)  # the first token
    return vf.WireEpisode(
        task={"type": "T", "data": task_data, "key": ask.task.key, "hash": ask.task.hash}, ok=True
    )


async def update(path, **_):
    await asyncio.sleep(0.5)  # POST /pause is on its way
    engine.version = 1


async def main():
    folder, (made, source) = pathlib.Path(tempfile.mkdtemp()), dispatcher(run)
    (folder / "broadcasts/step_1/STABLE").mkdir(
        parents=True
    )  # there: the trainer has written all of step 1
    pool, config = SimpleNamespace(update_weights=update), SimpleNamespace(output_dir=folder)
    watcher = WeightWatcher(
        config, policy=made.policy, inference=pool, observers=[made], lora_name=None
    )
    source.tasks.append(ask)
    running = [
        asyncio.create_task(watcher.apply_policy_update(1)),
        asyncio.create_task(made.start()),
    ]
    span = (await made.out_q.get()).run.work.policy
    print(
        VERSION,
        f"sampled under version {sampled[0]}, tagged with the span {span.start} to {span.end}",
    )
    await asyncio.gather(running[0], made.stop())


ask = task("t")
asyncio.run(main())
