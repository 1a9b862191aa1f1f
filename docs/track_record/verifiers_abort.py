"""A generation that the engine aborted is a turn like any other, and the agent is told that it ended by itself."""

import asyncio

from verifiers_stub import VERSION, response

for reason in ("stop", "length", "abort"):
    out = asyncio.run(response([7, 8], reason))
    told = out.raw["choices"][0]["finish_reason"]
    print(
        VERSION,
        f"the engine says {reason!r}, the trace {out.finish_reason!r}, the agent is told {told!r}",
    )
