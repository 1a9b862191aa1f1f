"""A group is added with the version that the collector had when it took the batch, whatever sampled it."""

import asyncio

from nemo_rl_stub import VERSION, collector, engine, prompt, say, worker

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience import rollouts

rollouts.ray.get = lambda calls: [call() for call in calls]
added = []


async def add(group, version, target):
    added.append(version)
    return "success"


sample, environment = prompt()
made = collector(add, policy_generation=worker(engine(([7, 8], "stop"))), task_to_env=environment)
taken = made.current_weight_version  # as _process_batch reads it, before it starts a thread
made.set_weight_version(5)
asyncio.run(
    made._collect_rollout_batch(
        BatchedDataDict({name: [value] for name, value in sample.items()}), taken, 6, 1, False
    )
)
say(f"nemo-rl {VERSION}: sampled after weights 5 were told of, added with {added}")
