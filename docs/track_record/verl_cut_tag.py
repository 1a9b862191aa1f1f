"""The response is cut to its length, the tags are not: a sample of old tokens names the newer weights of tokens that were thrown away."""

import asyncio

from verl_stub import VERSION, Server, tool_loop

out = asyncio.run(
    tool_loop(
        Server(
            (5, "completed", 1), (1, "aborted", 1), (3, "completed", 2), routes=lambda rows: None
        ),
        "21 22",
    )
)
steps = [
    token // 100 for token, mask in zip(out.response_ids, out.response_mask, strict=True) if mask
]
print(
    VERSION,
    "delivered tokens of steps",
    steps,
    "max_global_steps",
    out.extra_fields["max_global_steps"],
)
