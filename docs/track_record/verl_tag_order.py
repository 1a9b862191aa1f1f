"""min and max are the first and the last tag seen: where a request moves on to a replica with older weights, min is above max."""

import asyncio

from verl_stub import VERSION, Server, client

out = asyncio.run(
    client(Server((2, "aborted", 5), (1, "completed", 4), routes=lambda rows: None)).generate(
        "r", prompt_ids=[1], sampling_params={"max_tokens": 8}
    )
)
print(
    VERSION,
    "sampled by steps",
    [t // 100 for t in out.token_ids],
    {k: v for k, v in out.extra_fields.items() if "m" in k and "steps" in k},
)
