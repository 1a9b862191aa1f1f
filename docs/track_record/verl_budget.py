"""Without an explicit limit each attempt falls back to the server's default, which forgets what was generated before (verl#7207)."""

import asyncio

from verl_stub import LENGTH, VERSION, Server, client

server = Server((6, "aborted", 1), (9, "completed", 1), routes=lambda rows: None)
out = asyncio.run(client(server).generate("r", prompt_ids=[1, 2], sampling_params={}))
print(
    VERSION,
    "response_length",
    LENGTH,
    "- granted to the two attempts",
    server.granted,
    "- tokens in all",
    len(out.token_ids),
)
