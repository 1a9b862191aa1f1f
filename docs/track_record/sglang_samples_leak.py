"""A streamed call of several samples (n > 1) leaves all entries but one in the table of open calls for good: the server never drains."""

import asyncio

from sglang_stub import VERSION, call, engine, run


async def main():
    for stream in (False, True):
        await call(f"samples-{stream}", 3, n=4, stream=stream)
        await asyncio.sleep(1)  # what is over leaves the table a moment later
        print(
            VERSION,
            "streamed:" if stream else "not streamed:",
            len(engine().tokenizer_manager.rid_to_state),
            "open calls a second later",
        )


if __name__ == "__main__":
    run(main)
