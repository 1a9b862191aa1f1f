"""After 20 aborts the bridge hands over a sample as ``length`` though its budget is not used up."""

import asyncio

from areal_stub import VERSION, Server, bridge, request

server = Server(*[(1, "abort")] * 20, (12, "stop"))
out = asyncio.run(bridge(server).agenerate(request(budget=32)))
print(
    VERSION,
    f"budget 32, {out.output_len} tokens, stop reason {out.stop_reason!r}, {len(server.script)} answer not asked for",
)
