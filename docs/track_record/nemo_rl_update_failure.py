"""A weight transfer that fails leaves the gate closed before which every rollout waits."""

import asyncio

from nemo_rl_stub import VERSION, controller, manager, say


def transfer(**_):
    raise RuntimeError("NCCL")


async def main():
    made = controller(manager(None, None), transfer)
    made._rollout_permitted.set()
    try:
        await made._sync_weights()
    except RuntimeError as error:
        say(
            f"nemo-rl {VERSION}: _sync_weights raised {error!r}; rollouts permitted: {made._rollout_permitted.is_set()}"
        )


asyncio.run(main())
