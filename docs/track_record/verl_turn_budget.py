"""A later turn of ToolAgentLoop is granted more than the response has room for; what is sampled beyond it is thrown away."""

import asyncio

from verl_stub import LENGTH, VERSION, Server, tool_loop

server = Server((5, "completed", 1), (9, "completed", 1))
out = asyncio.run(tool_loop(server, "21 22"))
print(
    VERSION,
    "response_length",
    LENGTH,
    "- turn 1 sampled 5, the tool gave 2: room for 1; turn 2 was granted",
    server.granted[1],
)
print(VERSION, "sampled", 5 + server.granted[1], "tokens, delivered", sum(out.response_mask))
