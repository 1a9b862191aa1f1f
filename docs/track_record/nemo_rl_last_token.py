"""An answer that ends by itself on the last token of its sequence counts as truncated."""

import asyncio

from nemo_rl_stub import VERSION, engine, first, prompt, say, tokenizer, worker

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience import rollouts
from nemo_rl.experience.rollout_manager import AsyncRolloutImpl

rollouts.ray.get = lambda calls: [call() for call in calls]
for length in 5, 4:
    sample, environment = prompt()
    impl = AsyncRolloutImpl(tokenizer, environment, 1, length, 4, worker(engine(([7, 8], "stop"))))
    truncated = asyncio.run(impl.run_rollout(sample)).completions[0].truncated
    batch = BatchedDataDict({name: [value] for name, value in prompt()[0].items()})
    given = worker(engine(([7, 8], "stop"))), batch, tokenizer, environment, length, 1
    final = asyncio.run(first(rollouts.run_async_multi_turn_rollout_groups(*given))).final_batch
    say(
        f"nemo-rl {VERSION}: 2 + 2 of {length} tokens, ended by stop: truncated {truncated}, {final['truncated'].tolist()}"
    )
