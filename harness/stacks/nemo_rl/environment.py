"""An environment for NeMo-RL's rollouts: it gives the turns of a request, each after a turn of the
model that ended by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollproof.core.records import Request
from rollproof.stacks._support.subjects import record_turn
from rollproof.stacks._support.tokenizer import spell
from rollproof.stacks.nemo_rl.upstream import NemoRl, Ref
from rollproof.stacks.nemo_rl.vllm_generation import limits

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["TASK", "datum", "environment"]

TASK = "rollproof"


def datum(request: Request) -> dict[str, Any]:
    """A ``DatumSpec``. The environment's turns travel as its ``extra_env_info``."""
    import torch

    ids = torch.tensor(request.prompt_ids, dtype=torch.long)
    return {
        "message_log": [{"role": "user", "content": spell(request.prompt_ids), "token_ids": ids}],
        "length": len(request.prompt_ids),
        "extra_env_info": {"turns": [list(turn) for turn in request.turns]},
        "loss_multiplier": 1.0,
        "idx": 0,
        "task_name": TASK,
        "stop_strings": None,
    }


def environment(nemo: NemoRl, fleet: Fleet, request: Request) -> Mapping[str, Any]:
    """``task_to_env``. The environment ends early if a turn would leave no room for a reply,
    because NeMo-RL would cut the turn.
    """
    import torch

    _, total = limits(request)

    def reply(
        messages: list[Mapping[str, str]], info: dict[str, Any]
    ) -> tuple[str, dict[str, Any], bool]:
        words = [word for message in messages for word in message["content"].split()]
        turns = info["turns"]
        if (
            not turns
            or not words
            or int(words[-1]) != fleet.policy.eos_id
            or len(words) + len(turns[0]) >= total
        ):
            return "", info, True
        record_turn(fleet, request, tuple(turns[0]))
        return spell(turns[0]), {"turns": turns[1:]}, False

    def step(logs: list[list[Mapping[str, str]]], infos: list[dict[str, Any]]) -> Any:
        # a step takes a batch of conversations
        texts, left, ended = zip(*map(reply, logs, infos), strict=True)
        returned = nemo.environments.EnvironmentReturn(
            observations=[{"role": "environment", "content": text} for text in texts],
            metadata=list(left),
            next_stop_strings=[None] * len(texts),
            rewards=torch.zeros(len(texts)),
            terminateds=torch.tensor(ended),
            answers=None,
        )
        return Ref(returned)

    return {TASK: SimpleNamespace(step=SimpleNamespace(remote=step))}
