"""A response that ends by itself on the last token of its budget is reported as cut off by ``length``."""

import asyncio

from verl_stub import VERSION, Server, client

for name, script in {
    "one call": [(3, "stop", 1)],
    "resumed": [(2, "abort", 1), (1, "stop", 1)],
}.items():
    server = Server(*script, routes=lambda rows: None)
    out = asyncio.run(
        client(server).generate("r", prompt_ids=[1], sampling_params={"max_tokens": 3})
    )
    print(VERSION, f"{name}: the server said", script[-1][1], "- the client says", out.stop_reason)
