"""A call of several samples (n > 1) cannot be aborted by its id: the samples run under ids that the caller never learns."""

import asyncio

from sglang_stub import VERSION, abort, call, run, told


async def main():
    task = call("mine", 200, n=2)
    await asyncio.sleep(0.5)
    abort("mine")
    for number, reply in enumerate(await task):
        print(VERSION, f"sample {number}:", told(reply))


if __name__ == "__main__":
    run(main)
