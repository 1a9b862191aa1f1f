"""A rollout of no tokens comes out of ToolAgentLoop with its whole prompt as the response; padded, the loss mask is the pad id."""

import asyncio

from verl_stub import VERSION, Server, batch, tool_loop

# partial rollout is off, and the request is aborted before its first token
out = asyncio.run(tool_loop(Server((0, "aborted", 1)), partial=False))
print(VERSION, "prompt", out.prompt_ids, "response", out.response_ids, "mask", out.response_mask)
tensors = asyncio.run(batch([out])).batch
print(
    VERSION,
    "batch: responses",
    tensors["responses"][0].tolist(),
    "response_mask",
    tensors["response_mask"][0].tolist(),
)
