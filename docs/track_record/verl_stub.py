"""Stand-ins for the scripts beside this one: Ray handles, a scripted server, configurations. Nothing of rollproof, nothing of Ray's runtime."""

from __future__ import annotations

import asyncio
import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.disable(logging.WARNING)

import verl
import verl.experimental.agent_loop.agent_loop as agent_loop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput

if hasattr(llm_server, "FullyAsyncLLMServerClient"):
    Client = llm_server.FullyAsyncLLMServerClient
else:  # verl 0.8.0
    from verl.experimental.fully_async_policy.fully_async_rollouter import (
        FullyAsyncLLMServerClient as Client,
    )
Balancer = llm_server.GlobalRequestLoadBalancer
if hasattr(Balancer, "__ray_metadata__"):  # verl 0.8.0 wraps it by ray.remote
    Balancer = Balancer.__ray_metadata__.modified_class
VERSION = f"verl {verl.__version__}:"
LENGTH = 8
"""Both ``prompt_length`` and ``response_length`` of the configuration."""


class Handle:
    """``handle.method.remote(...)`` as Ray has it: an awaitable."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *args, **kwargs: _awaitable(getattr(self.target, name)(*args, **kwargs))
        )


def _awaitable(value: Any) -> Any:
    if asyncio.iscoroutine(value):
        return value
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


class Server:
    """Answers its calls with ``(tokens, stop_reason, version)`` in turn. Token and row values are 100 * version + position.

    Where a call states no limit, the budget is verl's own default (generate in vllm_async_server.py, async_sglang_server.py).
    """

    def __init__(
        self,
        *script: tuple[int, str, int],
        routes: Any = np.asarray,
        logprobs: Any = lambda values: values,
    ) -> None:
        self.script, self.routes, self.logprobs = list(script), routes, logprobs
        self.prompts: list[list[int]] = []
        self.granted: list[Any] = []

    async def generate(
        self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        count, reason, version = self.script.pop(0)
        self.prompts.append(list(prompt_ids))
        start = len(prompt_ids)
        self.granted.append(
            sampling_params.get("max_tokens") or min(LENGTH, LENGTH + LENGTH - start)
        )
        count = min(count, self.granted[-1])
        rows = 100 * version + np.arange(max(start + count - 1, 0))[:, None, None]
        return TokenOutput(
            token_ids=[100 * version + start + i for i in range(count)],
            log_probs=self.logprobs([-float(version)] * count),
            routed_experts=self.routes(rows) if count else None,
            stop_reason=reason,
            num_preempted=0,
            extra_fields={"global_steps": version},
        )


def config(*, partial: bool = True) -> Any:
    from omegaconf import OmegaConf

    turns = {
        "max_user_turns": None,
        "max_assistant_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
    }
    return OmegaConf.create(
        {
            "async_training": {"partial_rollout": partial},
            "actor_rollout_ref": {
                "rollout": {
                    "name": "vllm",
                    "prompt_length": LENGTH,
                    "response_length": LENGTH,
                    "full_determinism": False,
                    "multi_turn": {
                        **turns,
                        "tool_response_truncate_side": "middle",
                        "format": "ids",
                    },
                }
            },
            "data": {
                "apply_chat_template_kwargs": {},
                "mm_processor_kwargs": {},
                "continuous_token": {"enable": False},
            },
        }
    )


def client(*servers: Server, **options: Any) -> Client:
    balancer = Balancer({f"s{i}": Handle(server) for i, server in enumerate(servers)})
    return Client(config=config(**options), load_balancer_handle=Handle(balancer))


class Tokenizer:
    """Text is token ids in decimal; ``turns`` are the answers that the tool will give."""

    def __init__(self, *turns: str) -> None:
        self.turns, self.pad_token_id, self.eos_token_id, self.padding_side = (
            list(turns),
            151_643,
            0,
            "right",
        )

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [
            int(word)
            for message in messages
            for word in message["content"].split()
            if word.isdigit()
        ]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def pad(self, encoded: Any, max_length: int, return_attention_mask: bool, **_: Any) -> Any:
        import torch

        ids = encoded["input_ids"]
        fill, left = max_length - len(ids), self.padding_side == "left"
        join = (lambda pad, body: pad + body) if left else (lambda pad, body: body + pad)
        out = {"input_ids": torch.tensor([join([self.pad_token_id] * fill, ids)])}
        return (
            {**out, "attention_mask": torch.tensor([join([0] * fill, [1] * len(ids))])}
            if return_attention_mask
            else out
        )


@ToolParser.register("ids")
class Parser(ToolParser):
    async def extract_tool_calls(self, ids: list[int], tools: Any = None) -> Any:
        return self.tokenizer.decode(ids), [
            FunctionCall(name="t", arguments="{}")
        ] if self.tokenizer.turns else []


class Tool:
    name = "t"
    tool_schema = SimpleNamespace(model_dump=lambda **_: {})

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def create(self, create_kwargs: Any = None) -> Any:
        return "t", None

    async def execute(self, *_: Any, **__: Any) -> Any:
        return ToolResponse(text=self.tokenizer.turns.pop(0)), 0.0, {}

    async def release(self, _: Any) -> None: ...


async def tool_loop(server: Server, *turns: str, prompt: str = "11 12 13", **options: Any) -> Any:
    """verl's ToolAgentLoop on its own client: the finished ``AgentLoopOutput``."""
    tokenizer, settings = Tokenizer(*turns), config(**options)
    wrap = agent_loop.DictConfigWrap
    loop = ToolAgentLoop(
        trainer_config=wrap(settings),
        server_manager=client(server, **options),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=object,
        data_config=wrap(settings.data),
        tools=agent_loop.ToolListWrap([Tool(tokenizer)]),
    )
    loop.loop = asyncio.get_running_loop()
    return await loop.run({"temperature": 1.0}, raw_prompt=[{"role": "user", "content": prompt}])


async def batch(outputs: list[Any], **options: Any) -> Any:
    """verl's ``_agent_loop_postprocess`` on each output, then ``_postprocess`` on all: the training batch."""
    worker = object.__new__(agent_loop.AgentLoopWorker)
    settings = config(**options)
    worker.__dict__ |= {
        "config": settings,
        "rollout_config": settings.actor_rollout_ref.rollout,
        "tokenizer": Tokenizer(),
        "processor": None,
        "reward_loop_worker_handles": None,
        "distillation_enabled": False,
        "mm_processor_kwargs": {},
        "teacher_client": None,
    }
    return worker._postprocess(
        [await worker._agent_loop_postprocess(output, False, raw_prompt=[]) for output in outputs]
    )
