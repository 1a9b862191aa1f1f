"""A weight update as it is by default, while calls are paused in place, ends the whole engine and every call in flight."""

import asyncio
import subprocess
import sys

from sglang_stub import VERSION, call, engine, pause, run, update


async def main():
    call("mine", 400)
    await asyncio.sleep(0.5)
    await pause("in_place")
    await update()  # flush_cache is true unless it is said otherwise
    await asyncio.sleep(20)


if __name__ == "__main__" and "now" in sys.argv:
    engine()
    run(main)
elif __name__ == "__main__":
    done = subprocess.run(
        [sys.executable, __file__, "now"], capture_output=True, text=True, check=False
    )
    cause = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if line.startswith("AssertionError")
    ]
    print(VERSION, "the process that holds the engine ended with", done.returncode, "after", *cause)
