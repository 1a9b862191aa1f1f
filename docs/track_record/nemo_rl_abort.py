"""A call that was aborted is a turn that ended by itself; one without tokens is an error where routes were asked for."""

import asyncio

from nemo_rl_stub import VERSION, engine, prompt, say, tokenizer, worker

from nemo_rl.experience import rollouts
from nemo_rl.experience.failures import RolloutDataFailure
from nemo_rl.experience.rollout_manager import AsyncRolloutImpl

rollouts.ray.get = lambda calls: [call() for call in calls]
for answer, routes in (([7, 8], "abort"), False), (([], "abort"), True):
    sample, environment = prompt()
    impl = AsyncRolloutImpl(tokenizer, environment, 1, 64, 4, worker(engine(answer), routes))
    try:
        completion = asyncio.run(impl.run_rollout(sample)).completions[0]
        said = (
            f"truncated {completion.truncated}, {completion.message_log[1]['token_ids'].tolist()}"
        )
    except RolloutDataFailure as error:
        said = f"{type(error).__name__}: {error.__cause__}"
    say(f"nemo-rl {VERSION}: aborted after {len(answer[0])} of 8 tokens: {said}")
