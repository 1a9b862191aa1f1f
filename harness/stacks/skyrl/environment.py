"""An environment of SkyRL-Gym that gives the turns of a request.

SkyRL-Gym imports this module again, by its name, so it is a module of its own.
"""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from rollproof.stacks._support.tokenizer import spell

__all__ = ["ENTRY", "NAME"]

NAME = "rollproof-turns"
ENTRY = "rollproof.stacks.skyrl.environment:_TurnEnvironment"


class _TurnEnvironment(BaseTextEnv):  # type: ignore[misc]  # the base is SkyRL's, known at run time only
    """Gives the next turn after each turn of the model that ended by itself (on ``eos``); one that
    was cut off ends the episode.
    """

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        options: dict[str, Any] = dict(extras or {})
        self._turns: list[tuple[int, ...]] = list(options["turns"])
        self._eos = str(options["eos"])
        self._record = options["record"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Answer a turn of the model."""
        # only a turn that ended by itself is answered
        if not self._turns or action.split()[-1:] != [self._eos]:
            return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})
        turn = self._turns.pop(0)
        self._record(turn)
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": spell(turn)}],
            reward=0.0,
            done=False,
            metadata={},
        )
