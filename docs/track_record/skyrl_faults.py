"""Faults of SkyRL: `python docs/track_record/skyrl_faults.py [NAME ...]`.

vLLM's servers are replaced by one with scripted replies, and the tokenizer is ours.
"""

import asyncio
import importlib.metadata
import inspect
import logging
import typing
from types import SimpleNamespace
from typing import Any

import typing_extensions
from common import choice, run, serve

# SkyRL asks for Python 3.12 for one class: pydantic refuses the TypedDict of 3.11
typing.TypedDict = typing_extensions.TypedDict
logging.disable(logging.CRITICAL)
try:
    from loguru import logger

    logger.remove()
except (ImportError, ValueError):
    pass

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors as convert
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

VERSION = f"skyrl {importlib.metadata.version('skyrl')}:"
TAKES_TOKENIZER = "tokenizer" in inspect.signature(convert).parameters
"""Until 0.3.0 the conversion takes a tokenizer and nested lists, later a pad id and arrays."""


class Tokenizer:
    """Text is token ids in decimal."""

    pad_token_id, eos_token_id, eos_token = 0, 9, "<eos>"

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        words = [word for message in messages for word in message["content"].split()]
        return [int(word) for word in words if word.isdigit()]

    def batch_decode(self, rows: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


async def empty_abort() -> None:
    """A call that is aborted before its first token ends the whole batch with an error if routes
    are requested (SkyRL 0.4.0).
    """
    url = serve(choice([], "abort", routed_experts=None))
    client = RemoteInferenceClient(
        url, [url], 1, enable_return_routed_experts=True, tokenizer=Tokenizer()
    )
    request = {"prompt_token_ids": [[5, 6]], "sampling_params": {"max_tokens": 4, "logprobs": 0}}
    try:
        output = await client.generate(request)
        result = f"{output['response_ids']} {output['stop_reasons']}"
    except ValueError as error:
        result = f"ValueError: {error}"
    print(VERSION, f"aborted before its first token: {result}")
    await client.teardown()


async def empty_turn() -> None:
    """A conversation of no tokens ends the generator with an IndexError: the reward is put at the
    position before its first token.
    """
    generator = SimpleNamespace(custom_chat_template=None)
    # agent_loop: response_end_idx - initial_prompt_length is -1 if the only turn has no tokens
    reward = [(1.0, -1)]
    try:
        result = SkyRLGymGenerator._build_per_token_rewards(generator, reward, [], False)
    except IndexError as error:
        result = f"IndexError: {error}"
    print(VERSION, f"rewards of no tokens: {result}")


def lost_routes() -> None:
    """Missing routes become expert 0, surplus ones are cut, and neither is reported (SkyRL 0.3.0;
    0.4.0 refuses both).
    """
    row = [[7, 8]]
    for name, routes in {
        "no routes for the second sample": [[row] * 3, None],
        "9 rows for 4 tokens": [[row] * 9, [row] * 3],
    }.items():
        result = "takes arrays only"
        if TAKES_TOKENIZER:
            rewards, masks = [[0.0] * 2] * 2, [[1, 1]] * 2
            batch = convert(Tokenizer(), [[1, 2]] * 2, [[3, 4]] * 2, rewards, masks, None, routes)
            result = batch[6][:, :, 0].tolist()
        print(VERSION, f"{name}: {result}")


async def pause_failure() -> None:
    """An update that cannot pause one server leaves the others paused: the pause is before the try
    that resumes at its end.
    """
    paths: list[str] = []
    url = serve({}, on_call=paths.append)
    dispatch = object.__new__(WorkerDispatch)
    dispatch.colocate_all, dispatch._actor_groups = False, {}
    dispatch._inference_engine_client = RemoteInferenceClient(
        url, [url, "http://127.0.0.1:9"], 1, tokenizer=Tokenizer()
    )
    engine = SimpleNamespace(offload_kv_for_weight_sync=False, weight_sync_backend="nccl")
    policy = SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(rank=0)))
    dispatch.cfg = SimpleNamespace(
        trainer=SimpleNamespace(strategy="fsdp", policy=policy),
        generator=SimpleNamespace(inference_engine=engine),
    )
    try:
        await dispatch.save_weights_for_sampler()
    except OSError as error:
        await asyncio.sleep(1)  # the other request is in transit, and no task waits for it
        asked = [path.split("?")[0] for path in paths]
        failure = f"one of two servers is dead: {type(error).__name__}"
        print(VERSION, f"{failure}; the other was asked {asked}")
    await dispatch._inference_engine_client.teardown()


def short_fields() -> None:
    """Logprobs and loss masks that are shorter than their response are accepted, and aligned with
    its end: each belongs to another token.
    """
    pad = Tokenizer() if TAKES_TOKENIZER else 0
    batch = convert(pad, [[1, 2]], [[3, 4, 5, 6, 7]], [[0.0] * 5], [[1, 1, 1]], [[-0.1, -0.2]])
    logprobs = [round(value, 1) for value in batch[5][0].tolist()]
    print(VERSION, f"2 logprobs for 5 tokens: {logprobs}")
    print(VERSION, f"a mask of 3 for 5 tokens: {batch[4][0].tolist()}")


if __name__ == "__main__":
    run(empty_abort, empty_turn, lost_routes, pause_failure, short_fields)
