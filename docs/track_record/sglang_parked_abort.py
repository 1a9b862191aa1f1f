"""An abort of a call that waits for the end of a pause is forgotten, and so is every later abort of that call: it runs to its end."""

import asyncio

from sglang_stub import VERSION, abort, call, pause, resume, run, told


async def main():
    await pause("abort")
    parked = call("parked", 200)
    await asyncio.sleep(0.5)
    abort("parked")
    await asyncio.sleep(0.5)
    print(
        VERSION,
        "half a second after its abort the parked call is",
        "answered" if parked.done() else "not answered",
    )
    await resume()
    await asyncio.sleep(0.3)
    abort("parked")
    print(VERSION, "resumed, and aborted once more:", told(await parked))


if __name__ == "__main__":
    run(main)
