"""A call that was aborted is trained as a whole turn: why it ended is not read; without tokens the conversation vanishes."""

import asyncio
from types import SimpleNamespace

import aiohttp
from http_stub import choice, serve
from trl_stub import VERSION, loop


async def main():
    for tokens in ([7, 8], []):
        rollouts = loop(serve(choice(tokens, "abort")), SimpleNamespace(value=3))
        async with aiohttp.ClientSession() as rollouts.session:
            _, _, sequences, *_ = await rollouts._generate_one(
                [{"role": "user", "content": "5 6"}], {}, []
            )
        rows = [(row.input_ids, row.completion_mask) for row in sequences]
        print(f"trl {VERSION}: aborted after {len(tokens)} of 8 tokens: rows {rows}")


asyncio.run(main())
