"""ToolAgentLoop keeps the routes of the last turn only: rows of earlier turns come from a prefill under newer weights (verl#6054, #5825)."""

import asyncio

from verl_stub import VERSION, Server, tool_loop

out = asyncio.run(tool_loop(Server((2, "completed", 1), (2, "completed", 2)), "21 22"))
print(
    VERSION,
    "sampled by step",
    [token // 100 for token, mask in zip(out.response_ids, out.response_mask, strict=True) if mask],
)
print(
    VERSION,
    "rows computed by step",
    [int(row) // 100 for row in out.routed_experts[:, 0, 0]],
    "(rows 0-2 prompt, 3-4 turn 1, 5-6 tool, 7 turn 2)",
)
