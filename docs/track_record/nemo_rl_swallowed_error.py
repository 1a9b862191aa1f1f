"""Asynchronous GRPO hands over a rollout whose generation failed: without a response and with reward 0, or with the turns before it."""

import asyncio

from nemo_rl_stub import VERSION, engine, first, prompt, say, tokenizer, worker

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience import rollouts

rollouts.ray.get = lambda calls: [call() for call in calls]
died = RuntimeError("EngineDeadError")
for answers, turns in ([died], []), ([([7, 8], "stop"), died], ["9"]):
    sample, environment = prompt(turns)
    batch = BatchedDataDict({name: [value] for name, value in sample.items()})
    given = worker(engine(*answers)), batch, tokenizer, environment, 64, 1
    final = asyncio.run(first(rollouts.run_async_multi_turn_rollout_groups(*given))).final_batch
    log = [(message["role"], message["token_ids"].tolist()) for message in final["message_log"][0]]
    say(
        f"nemo-rl {VERSION}: {log}, truncated {final['truncated'].tolist()}, reward {final['total_reward'].tolist()}"
    )
