"""One token id beyond the vocabulary in a request ends the whole engine and every call in flight."""

import asyncio
import subprocess
import sys

from sglang_stub import VERSION, call, engine, run


async def main():
    call("beside", 400)
    await asyncio.sleep(0.5)
    await asyncio.wait(
        [call("mine", 4, input_ids=[5, 512])], timeout=20
    )  # the model has 512 tokens: 0 to 511
    print("alive")


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
        if line.startswith(("IndexError", "RuntimeError", "alive"))
    ]
    print(
        VERSION,
        "the process that holds the engine ended with",
        done.returncode,
        "after",
        *cause[:1],
    )
