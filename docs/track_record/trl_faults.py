"""Faults of TRL: `python docs/track_record/trl_faults.py [NAME ...]`.

vLLM's server has scripted replies; what surrounds the rollout loop is replaced.
"""

import asyncio
import importlib.metadata
import logging
import queue
from types import SimpleNamespace
from typing import Any

import aiohttp
import torch
from accelerate import PartialState
from common import choice, run, serve
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

VERSION = f"trl {importlib.metadata.version('trl')}:"
PartialState()
logging.disable(logging.CRITICAL)


class Tokenizer:
    """Text is token ids in decimal."""

    pad_token_id, eos_token, response_template = 0, "<eos>", {}

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [int(word) for message in messages for word in message["content"].split()]

    def parse_response(self, ids: Any, **_: Any) -> dict[str, str]:
        return {"role": "assistant", "content": " ".join(map(str, ids))}


def loop(url: str, version: Any, **options: Any) -> Any:
    """TRL's loop over one prompt, on the server at ``url``; ``version`` holds the trainer's count
    of updates.
    """
    queues = ("rollout_buffer", "exception_info_queue", "metrics_queue")
    rollouts = _AsyncRolloutLoop(
        model_name="m",
        dataset=[{"prompt": [{"role": "user", "content": "5 6"}]}],
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        processing_class=Tokenizer(),
        eos_token_ids=[9],
        model_version_value=version,
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=None,
        vllm_server_url=url,
        max_tokens=8,
        **{name: queue.Queue() for name in queues},
        **options,
    )
    rollouts._loop.close()
    return rollouts


async def abort() -> None:
    """A call that was aborted is trained as a whole turn: why it ended is not read; without tokens
    the conversation vanishes.
    """
    for tokens in ([7, 8], []):
        rollouts = loop(serve(choice(tokens, "abort")), SimpleNamespace(value=3))
        prompt = [{"role": "user", "content": "5 6"}]
        async with aiohttp.ClientSession() as rollouts.session:
            _, _, sequences, *_ = await rollouts._generate_one(prompt, {}, [])
        rows = [(row.input_ids, row.completion_mask) for row in sequences]
        print(VERSION, f"aborted after {len(tokens)} of 8 tokens: rows {rows}")


async def group_tag() -> None:
    """The version of a group is read when its first generation starts: later ones of the group
    carry it, whatever weights sampled them.
    """
    version, sampled, stop = SimpleNamespace(value=3), [], asyncio.Event()

    def update(_path: str) -> None:  # the trainer publishes new weights after each call
        sampled.append(version.value)
        version.value += 1

    url = serve(choice([7, 9], "stop"), on_call=update)
    rollouts = loop(url, version, num_generations=3, max_inflight_tasks=1)
    async with aiohttp.ClientSession() as rollouts.session:
        task = asyncio.ensure_future(rollouts._generate_loop(stop))
        group = await rollouts._groups_to_score.get()
        stop.set()
        await task
    tags = [sample.model_version for sample in await rollouts._score_group(group)]
    print(VERSION, f"tags {tags}, sampled under {sampled[:3]}")


def update_failure() -> None:
    """A weight transfer that fails leaves the server paused: nothing between pause and resume
    cleans up.
    """
    calls = []

    def fail(_weights: Any) -> None:
        raise RuntimeError("the transfer broke")

    accelerator = SimpleNamespace(
        is_main_process=True, unwrap_model=lambda model: model, wait_for_everyone=lambda: None
    )
    transfer = SimpleNamespace(
        pause=lambda: calls.append("pause"),
        resume=lambda: calls.append("resume"),
        send_weights=fail,
    )
    trainer = SimpleNamespace(
        model=torch.nn.Identity(),
        accelerator=accelerator,
        weight_transfer=transfer,
        _streaming_iter=lambda: iter(()),
    )
    try:
        AsyncGRPOTrainer._sync_weight_merged(trainer, 0.0)
    except RuntimeError as error:
        print(VERSION, f"{error}; the server was asked to {calls}")


if __name__ == "__main__":
    run(abort, group_tag, update_failure)
