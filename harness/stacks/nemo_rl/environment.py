"""An environment for NeMo-RL's rollouts: the turns of a request, after turns of the model that end
by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollproof.core.events.rollout import Observation
from rollproof.core.records import Request
from rollproof.stacks._support.tokenizer import spell
from rollproof.stacks.nemo_rl.upstream import NemoRl, Ref
from rollproof.stacks.nemo_rl.vllm_generation import limits

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["TASK", "datum", "environment"]

TASK = "rollproof"


def datum(request: Request) -> dict[str, Any]:
    """A ``DatumSpec``. What the environment has still to say travels as its ``extra_env_info``."""
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
    """``task_to_env``. A turn is only given where room is left for an answer to it: NeMo-RL would
    cut it off otherwise.
    """
    import torch

    _, total = limits(request)

    def answered(
        messages: list[Mapping[str, str]], info: dict[str, Any]
    ) -> tuple[str, dict[str, Any], bool]:
        said = [word for message in messages for word in message["content"].split()]
        turns = info["turns"]
        if (
            not turns
            or not said
            or int(said[-1]) != fleet.policy.eos_id
            or len(said) + len(turns[0]) >= total
        ):
            return "", info, True
        fleet.recorder.record(Observation(request_id=request.request_id, token_ids=tuple(turns[0])))
        return spell(turns[0]), {"turns": turns[1:]}, False

    def step(logs: list[list[Mapping[str, str]]], infos: list[dict[str, Any]]) -> Any:
        texts, left, ended = zip(*map(answered, logs, infos), strict=True)
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
