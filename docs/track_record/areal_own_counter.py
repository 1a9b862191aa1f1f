"""A tag is the client's own counter: what a server says of its weights is not read."""

import asyncio

from areal_stub import VERSION, Server, bridge, engine, request

for client in (engine, bridge):
    server = Server((2, "stop"))
    answer = server.answer
    server.answer = lambda payload, answer=answer: (
        reply := answer(payload),
        reply["meta_info"].update(weight_version="9"),
    )[0]
    made = client(server)
    made.set_version(7)
    out = asyncio.run(made.agenerate(request()))
    print(
        VERSION,
        client.__name__,
        '- the reply says weight_version "9", the tokens are tagged',
        out.output_versions,
    )
