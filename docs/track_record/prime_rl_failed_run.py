"""A request to an environment that fails ends the dispatcher: its own stand-in for the episode is refused, whatever the taskset."""

import asyncio

from prime_rl_stub import VERSION, dispatcher, task


async def run(**_):
    raise RuntimeError("env server request failed")


async def main():
    made, source = dispatcher(run)
    source.tasks += [task("a")]
    try:
        await asyncio.wait_for(made.start(), 5)
    except ValueError as error:
        _, where, what, *_ = str(error).splitlines()
        print(
            VERSION,
            f"Dispatcher.start ends with {type(error).__name__}: {where}: {what.partition(' [')[0].strip()}",
        )
    print(VERSION, f"episodes that reached the sink: {made.out_q.qsize()} of 1")


asyncio.run(main())
