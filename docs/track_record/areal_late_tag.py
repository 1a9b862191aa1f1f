"""Tokens are tagged with the version that is set when their reply is read, not when they were sampled."""

import asyncio

from areal_stub import VERSION, Server, bridge, engine, request

for client in (engine, bridge):
    server = Server(
        (2, "stop"), hook=lambda client: client.set_version(8)
    )  # the update ends while the reply is under way
    made = client(server)
    made.set_version(7)
    out = asyncio.run(made.agenerate(request()))
    print(
        VERSION, client.__name__, "- asked and sampled under version 7, tagged", out.output_versions
    )
