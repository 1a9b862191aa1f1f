"""An abort of a request id ends every call whose id begins with it: aborting "1" aborts "10", too."""

import asyncio

from sglang_stub import VERSION, abort, call, run


async def main():
    first, tenth = call("1", 400), call("10", 400)
    await asyncio.sleep(1)
    abort("1")
    for name, task in (("1", first), ("10", tenth)):
        print(VERSION, f"call {name!r}: finish", (await task)["meta_info"]["finish_reason"]["type"])


if __name__ == "__main__":
    run(main)
