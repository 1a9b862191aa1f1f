"""With partial rollout off, an aborted request comes out of ToolAgentLoop like a finished one: nothing says that it was cut off (verl#6882)."""

import asyncio

from verl_stub import VERSION, Server, tool_loop

out = asyncio.run(tool_loop(Server((2, "aborted", 1)), partial=False))
fields = {
    name: value
    for name, value in out.model_dump().items()
    if "abort" in str(value).lower() or "stop" in name
}
print(
    VERSION,
    "aborted after 2 of 8 tokens: response",
    out.response_ids,
    "mask",
    out.response_mask,
    "fields that say so:",
    fields or "none",
)
