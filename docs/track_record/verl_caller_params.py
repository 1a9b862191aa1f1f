"""The client writes the remaining budget into the caller's own ``sampling_params``: the caller's next request gets what was left."""

import asyncio

from verl_stub import VERSION, Server, client

params = {"max_tokens": 5}
server = Server((2, "aborted", 1), (1, "completed", 1), routes=lambda rows: None)
asyncio.run(client(server).generate("r", prompt_ids=[1, 2], sampling_params=params))
print(VERSION, "the caller handed in {'max_tokens': 5} and holds", params, "afterwards")
