"""On resume the routes of the whole sequence are appended to those of the first call: 11 rows for 8 tokens."""

import asyncio

from areal_stub import VERSION, Server, bridge, engine, request

for client in (engine, bridge):
    out = asyncio.run(client(Server((2, "abort"), (3, "stop"))).agenerate(request()))
    rows = out.routed_experts[:, 0].tolist()
    print(
        VERSION,
        client.__name__,
        "- tokens",
        out.input_len + out.output_len,
        "rows",
        len(rows),
        rows,
    )
