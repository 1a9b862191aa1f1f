"""An attempt that sampled nothing still sets ``min_global_steps``: the sample looks staler than any of its tokens."""

import asyncio

from verl_stub import VERSION, Server, client

server = Server((0, "aborted", 3), (2, "completed", 4))  # aborted before its first token under step 3, sampled under step 4
out = asyncio.run(client(server).generate("r", prompt_ids=[1, 2], sampling_params={"max_tokens": 2}))
print(VERSION, "tokens", out.token_ids, "all of step 4; min_global_steps", out.extra_fields["min_global_steps"])
