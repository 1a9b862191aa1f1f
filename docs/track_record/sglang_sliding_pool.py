"""On the torch_native backend a model with a KV pool for sliding attention reads that pool by the slots of the other: it ends, or is wrong."""

import asyncio
import os
import subprocess
import sys

from sglang_stub import VERSION, call, engine, run


async def main():
    for number in range(24):
        print(f"served {200 * number} tokens", flush=True)
        await asyncio.wait([call(f"mine {number}", 1, input_ids=[5 + number] * 199)], timeout=20)


if __name__ == "__main__" and "now" in sys.argv:
    engine()  # 4096 slots for full attention, 3276 for sliding attention
    run(main)
elif __name__ == "__main__":
    surroundings = {**os.environ, "TRACK_RECORD_MODEL": "mellum"}
    done = subprocess.run(
        [sys.executable, __file__, "now"],
        capture_output=True,
        text=True,
        check=False,
        env=surroundings,
    )
    served = [line for line in done.stdout.splitlines() if line.startswith("served")][-1]
    cause = [
        line for line in (done.stdout + done.stderr).splitlines() if line.startswith("IndexError")
    ]
    print(
        VERSION,
        f"Mellum, {served}: the process that holds the engine ended with {done.returncode} after",
        *cause[:1],
    )
