"""A segment without logprobs leaves a list that is too short: the later values stand at earlier tokens, and nothing says so."""

import asyncio

from verl_stub import VERSION, Server, client


def logprobs(values):
    return None if -2.0 in values else values  # the segment of step 2 comes without


server = Server(
    (2, "aborted", 1),
    (2, "aborted", 2),
    (2, "completed", 3),
    routes=lambda rows: None,
    logprobs=logprobs,
)
out = asyncio.run(
    client(server).generate("r", prompt_ids=[1, 2], sampling_params={"max_tokens": 8})
)
print(
    VERSION,
    "tokens of steps",
    [t // 100 for t in out.token_ids],
    "logprobs of steps",
    [int(-p) for p in out.log_probs],
)
