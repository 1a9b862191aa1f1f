"""A conversation of no tokens ends the generator with an IndexError: the reward is put at the place before its first token."""

import asyncio
from types import SimpleNamespace

from skyrl_stub import VERSION

from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator


async def main():
    generator = SimpleNamespace(custom_chat_template=None)
    try:
        # agent_loop: response_end_idx - initial_prompt_length is -1 where the only turn has no tokens
        rewards = SkyRLGymGenerator._build_per_token_rewards(generator, [(1.0, -1)], [], False)
        print(f"skyrl {VERSION}: rewards of no tokens: {rewards}")
    except IndexError as error:
        print(f"skyrl {VERSION}: rewards of no tokens: IndexError: {error}")


asyncio.run(main())
