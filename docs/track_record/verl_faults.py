"""Faults of verl: `python docs/track_record/verl_faults.py [NAME ...]`.

Replaced are Ray's handles, the rollout servers (their replies are scripted), the trainer and the
rollout workers of a weight update. All else is verl's own code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import run

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.disable(logging.WARNING)

import torch
import verl
import verl.checkpoint_engine.base as checkpoint
import verl.experimental.agent_loop.agent_loop as agent_loop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse
from verl.trainer.ppo import rollout_corr_helper
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
    """A Ray handle: ``handle.method.remote(...)`` returns an awaitable."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Any:
            # called at once: verl does not await every call
            value = getattr(self.target, name)(*args, **kwargs)
            if asyncio.iscoroutine(value):
                return value
            result = asyncio.get_running_loop().create_future()
            result.set_result(value)
            return result

        return SimpleNamespace(remote=remote)


def no_routes(rows: Any) -> None:
    """Routes of a server that returns none."""


class Server:
    """Replies to its calls with ``(tokens, stop_reason, version)`` in turn.

    Token and row values are 100 * version + position.
    """

    def __init__(
        self,
        *script: tuple[int, str, int],
        routes: Any = np.asarray,
        logprobs: Any = lambda values: values,
    ) -> None:
        self.script, self.routes, self.logprobs = list(script), routes, logprobs
        self.granted: list[Any] = []

    async def generate(
        self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        count, reason, version = self.script.pop(0)
        start = len(prompt_ids)
        # Without a limit in the call the budget is verl's own default (generate in
        # vllm_async_server.py, async_sglang_server.py).
        default = min(LENGTH, LENGTH + LENGTH - start)
        self.granted.append(sampling_params.get("max_tokens") or default)
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
    """verl's configuration."""
    from omegaconf import OmegaConf

    turns = {
        "max_user_turns": None,
        "max_assistant_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "ids",
    }
    rollout = {
        "name": "vllm",
        "prompt_length": LENGTH,
        "response_length": LENGTH,
        "full_determinism": False,
        "multi_turn": turns,
    }
    data = {
        "apply_chat_template_kwargs": {},
        "mm_processor_kwargs": {},
        "continuous_token": {"enable": False},
    }
    return OmegaConf.create(
        {
            "async_training": {"partial_rollout": partial},
            "actor_rollout_ref": {"rollout": rollout},
            "data": data,
        }
    )


def client(*servers: Server, **options: Any) -> Any:
    """verl's resume client with verl's balancer."""
    balancer = Balancer({f"s{i}": Handle(server) for i, server in enumerate(servers)})
    return Client(config=config(**options), load_balancer_handle=Handle(balancer))


async def generate(server: Server, prompt_ids: list[int], max_tokens: int | None = None) -> Any:
    """The client's reply to one request."""
    params = {} if max_tokens is None else {"max_tokens": max_tokens}
    return await client(server).generate("r", prompt_ids=prompt_ids, sampling_params=params)


class Tokenizer:
    """Text is token ids in decimal; ``turns`` are the replies that the tool will give."""

    pad_token_id, eos_token_id, padding_side = 151_643, 0, "right"

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        words = [word for message in messages for word in message["content"].split()]
        return [int(word) for word in words if word.isdigit()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def pad(self, encoded: Any, max_length: int, return_attention_mask: bool, **_: Any) -> Any:
        import torch

        ids = encoded["input_ids"]
        fill = max_length - len(ids)

        def padded(padding: int, values: list[int]) -> Any:
            if self.padding_side == "left":
                return torch.tensor([[padding] * fill + values])
            return torch.tensor([values + [padding] * fill])

        out = {"input_ids": padded(self.pad_token_id, ids)}
        if return_attention_mask:
            out["attention_mask"] = padded(0, [1] * len(ids))
        return out


@ToolParser.register("ids")
class Parser(ToolParser):
    """Parses every turn as a tool call while the tool has replies left."""

    async def extract_tool_calls(self, ids: list[int], tools: Any = None) -> Any:
        calls = [FunctionCall(name="t", arguments="{}")] if self.tokenizer.turns else []
        return self.tokenizer.decode(ids), calls


class Tool:
    """Gives the tokenizer's turns."""

    name = "t"
    tool_schema = SimpleNamespace(model_dump=lambda **_: {})

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def create(self, create_kwargs: Any = None) -> Any:
        return "t", None

    async def execute(self, *_: Any, **__: Any) -> Any:
        return ToolResponse(text=self.tokenizer.turns.pop(0)), 0.0, {}

    async def release(self, _: Any) -> None: ...


async def tool_loop(server: Server, *turns: str, **options: Any) -> Any:
    """The ``AgentLoopOutput`` of verl's ToolAgentLoop on its own client."""
    tokenizer, settings = Tokenizer(*turns), config(**options)
    loop = ToolAgentLoop(
        trainer_config=agent_loop.DictConfigWrap(settings),
        server_manager=client(server, **options),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=object,
        data_config=agent_loop.DictConfigWrap(settings.data),
        tools=agent_loop.ToolListWrap([Tool(tokenizer)]),
    )
    loop.loop = asyncio.get_running_loop()
    prompt = [{"role": "user", "content": "11 12 13"}]
    return await loop.run({"temperature": 1.0}, raw_prompt=prompt)


def sampled_steps(output: Any) -> list[int]:
    """The step that sampled each of the delivered tokens."""
    pairs = zip(output.response_ids, output.response_mask, strict=True)
    return [token // 100 for token, mask in pairs if mask]


def sample(response_ids: list[int], **fields: Any) -> Any:
    """An ``AgentLoopOutput`` with the prompt 1 2."""
    fields = {"response_mask": [1] * len(response_ids), **fields}
    return agent_loop.AgentLoopOutput(
        prompt_ids=[1, 2], response_ids=response_ids, metrics={}, extra_fields={}, **fields
    )


async def batch(outputs: list[Any], tokenizer: Any = None) -> Any:
    """The training batch: ``_agent_loop_postprocess`` of each output, ``_postprocess`` of all."""
    worker = object.__new__(agent_loop.AgentLoopWorker)
    settings = config()
    worker.__dict__ |= {
        "config": settings,
        "rollout_config": settings.actor_rollout_ref.rollout,
        "tokenizer": tokenizer or Tokenizer(),
        "processor": None,
        "reward_loop_worker_handles": None,
        "distillation_enabled": False,
        "mm_processor_kwargs": {},
        "teacher_client": None,
    }
    padded = [
        await worker._agent_loop_postprocess(output, False, raw_prompt=[]) for output in outputs
    ]
    return worker._postprocess(padded).batch


class WorkerGroup:
    """A worker group. A rollout worker publishes the step to its server only if there is one, as
    verl's adapters do.
    """

    def __init__(self, replicas: Any = (), *, fails: bool = False) -> None:
        self.replicas, self.fails, self.world_size = replicas, fails, max(len(replicas), 1)

    def execute_checkpoint_engine(self, method: Any, **_: Any) -> Any:
        return [{}] * self.world_size

    def update_weights(self, global_steps: int | None = None, mode: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("transfer failed")
        for replica in self.replicas:
            replica.loaded.append("paused" if replica.paused else "SERVING")
            replica.step = replica.step if global_steps is None else global_steps
        return [{}] * self.world_size


class Replica:
    """The state of a replica; each of its methods takes the next of ``seconds``, else 10 ms."""

    def __init__(self, *seconds: float) -> None:
        self.step, self.paused, self.kv, self.seconds = 1, False, True, list(seconds)
        self.loaded: list[str] = []
        self.workers = [self]

    async def _set(self, name: str, value: bool) -> None:
        setattr(self, name, value)
        await asyncio.sleep(self.seconds.pop(0) if self.seconds else 0.01)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._set("paused", True)

    async def resume_generation(self) -> None:
        await self._set("paused", False)

    async def release_kv_cache(self) -> None:
        await self._set("kv", False)

    async def resume_kv_cache(self) -> None:
        await self._set("kv", True)


def manager(*seconds: float, fails: bool = False) -> tuple[Any, Replica]:
    """verl's ``CheckpointEngineManager``, and its only replica."""
    checkpoint.ray = SimpleNamespace(get=lambda value: value)
    checkpoint.RayClassWithInitArgs = lambda **_: None
    checkpoint.RayWorkerGroup = lambda worker_handles, **_: WorkerGroup(worker_handles)
    topology = SimpleNamespace(build_topology=lambda *_: ({}, {}))
    checkpoint.CheckpointEngineRegistry._registry["none"] = topology
    replica = Replica(*seconds)
    settings = SimpleNamespace(backend="none", custom_backend_module=None)
    return checkpoint.CheckpointEngineManager(
        settings, WorkerGroup(fails=fails), [replica]
    ), replica


async def budget() -> None:
    """Without an explicit limit each attempt falls back to the server's default, which forgets what
    was generated before (verl#7207).
    """
    server = Server((6, "aborted", 1), (9, "completed", 1), routes=no_routes)
    out = await generate(server, [1, 2])
    granted = f"granted to the two attempts {server.granted} - tokens in all {len(out.token_ids)}"
    print(VERSION, f"response_length {LENGTH} - {granted}")


async def caller_params() -> None:
    """The client writes the remaining budget into the caller's own ``sampling_params``: the
    caller's next request gets what was left.
    """
    params = {"max_tokens": 5}
    server = Server((2, "aborted", 1), (1, "completed", 1), routes=no_routes)
    await client(server).generate("r", prompt_ids=[1, 2], sampling_params=params)
    print(VERSION, f"the caller handed in {{'max_tokens': 5}} and holds {params} afterwards")


async def cut_tag() -> None:
    """The response is cut to its length, the tags are not: a sample of old tokens names the newer
    weights of tokens that were thrown away.
    """
    script = (5, "completed", 1), (1, "aborted", 1), (3, "completed", 2)
    out = await tool_loop(Server(*script, routes=no_routes), "21 22")
    newest = out.extra_fields["max_global_steps"]
    print(VERSION, f"delivered tokens of steps {sampled_steps(out)} max_global_steps {newest}")


async def dead_server() -> None:
    """A dead server has no requests in flight, so the least-loaded balancer sends every new request
    to it.
    """

    class Dead(Server):
        async def generate(self, **_: Any) -> Any:
            raise ConnectionError("actor died")

    class Busy(Server):
        async def generate(self, **call: Any) -> Any:
            await asyncio.sleep(0.05)
            return await super().generate(**call)

    random.seed(0)  # since 0.9.1 the balancer draws among equals
    busy = Busy(*[(1, "completed", 1)] * 20, routes=no_routes)
    balancer = Handle(Balancer({"dead": Handle(Dead()), "alive": Handle(busy)}))
    resuming = Client(config=config(), load_balancer_handle=balancer)

    async def request(i: int) -> None:
        await asyncio.sleep(i * 0.001)
        await resuming.generate(f"r{i}", prompt_ids=[1], sampling_params={"max_tokens": 2})

    results = await asyncio.gather(*(request(i) for i in range(20)), return_exceptions=True)
    failed = sum(isinstance(result, ConnectionError) for result in results)
    print(VERSION, f"1 of 2 servers is dead: {failed} of 20 requests failed")


async def empty_padding() -> None:
    """A response of no tokens breaks the padding: for it a tokenizer of transformers returns a
    list, whatever was asked for (verl#6675).
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1}, "a"))
    special = {"pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    try:
        tensors = await batch([sample([3]), sample([])], tokenizer)
        result = f"{len(tensors['responses'])} rows"
    except AttributeError as error:
        result = f"AttributeError: {error}"
    print(VERSION, f"2 samples, one of no tokens: {result}")


async def empty_turn() -> None:
    """A rollout of no tokens comes out of ToolAgentLoop with its whole prompt as the response; in a
    padded batch the loss mask is the pad id.
    """
    # partial rollout is off, and the request is aborted before its first token
    out = await tool_loop(Server((0, "aborted", 1)), partial=False)
    print(VERSION, f"prompt {out.prompt_ids} response {out.response_ids} mask {out.response_mask}")
    tensors = await batch([out])
    responses, mask = tensors["responses"][0].tolist(), tensors["response_mask"][0].tolist()
    print(VERSION, f"batch: responses {responses} response_mask {mask}")


async def logprob_gap() -> None:
    """A segment without logprobs leaves a list that is too short: the later values move to earlier
    tokens, and nothing reports it.
    """

    def without_step_2(values: list[float]) -> list[float] | None:
        return None if -2.0 in values else values

    script = (2, "aborted", 1), (2, "aborted", 2), (2, "completed", 3)
    out = await generate(
        Server(*script, routes=no_routes, logprobs=without_step_2), [1, 2], max_tokens=8
    )
    tokens, logprobs = [t // 100 for t in out.token_ids], [int(-p) for p in out.log_probs]
    print(VERSION, f"tokens of steps {tokens} logprobs of steps {logprobs}")


async def min_tag() -> None:
    """An attempt that sampled nothing still sets ``min_global_steps``, and in 0.8.0
    ``max_global_steps``: tags of steps that no token has.
    """
    # aborted before its first token under step 3, sampled under step 4
    before = Server((0, "aborted", 3), (2, "completed", 4))
    # aborted on its last token; without a stated limit 0.8.0 asks once more
    after = Server((LENGTH, "aborted", 3), (0, "completed", 4))
    for server, step, limit in (before, 4, 2), (after, 3, None):
        out = await generate(server, [1, 2], max_tokens=limit)
        oldest, newest = (out.extra_fields[f"{name}_global_steps"] for name in ("min", "max"))
        tags = f"min_global_steps {oldest}, max_global_steps {newest}"
        print(VERSION, f"{len(out.token_ids)} tokens, all of step {step}; {tags}")


async def mixed_batch() -> None:
    """Whether a batch has routes and logprobs is decided by its first sample: those of the others
    are dropped, or the batch fails.
    """
    for name, key, value in (
        ("routed_experts", "routed_experts", np.full((2, 1, 2), 9)),
        ("response_logprobs", "rollout_log_probs", [-1.5]),
    ):
        for first, values in ("without", (None, value)), ("with", (value, None)):
            try:
                tensors = await batch([sample([3], **{name: field}) for field in values])
                result = f"the batch has {key}: {key in tensors.keys()}"
            except TypeError as error:
                result = f"TypeError: {error}"
            print(VERSION, f"{first} {name} first: {result}")


async def multi_turn_routes() -> None:
    """ToolAgentLoop keeps the routes of the last turn only: rows of earlier turns come from a
    prefill under newer weights (verl#6054, verl#5825).
    """
    out = await tool_loop(Server((2, "completed", 1), (2, "completed", 2)), "21 22")
    rows = [int(row) // 100 for row in out.routed_experts[:, 0, 0]]
    print(VERSION, f"sampled by step {sampled_steps(out)}")
    print(
        VERSION,
        f"rows computed by step {rows} (rows 0-2 prompt, 3-4 turn 1, 5-6 tool, 7 turn 2)",
    )


async def numpy_routes() -> None:
    """Routes of a resumed sample are joined by ``torch.cat``, but vLLM returns numpy arrays: the
    rollout fails (verl#7158).
    """
    try:
        out = await generate(Server((2, "aborted", 1), (1, "completed", 1)), [1, 2], max_tokens=5)
        result = f"{len(out.routed_experts)} rows"
    except TypeError as error:
        result = f"TypeError {error}"
    print(VERSION, f"resumed with numpy routes: {result}")


async def partial_off() -> None:
    """With partial rollout off, an aborted request comes out of ToolAgentLoop like a finished one:
    nothing says that it was cut off (verl#6882).
    """
    out = await tool_loop(Server((2, "aborted", 1)), partial=False)
    fields = {
        name: value
        for name, value in out.model_dump().items()
        if "abort" in str(value).lower() or "stop" in name
    }
    response = f"response {out.response_ids} mask {out.response_mask}"
    print(
        VERSION,
        f"aborted after 2 of 8 tokens: {response} fields that say so: {fields or 'none'}",
    )


def readd_server() -> None:
    """A server that leaves the balancer and comes back starts at 0, whatever still runs on it: the
    count stays too low from then on.
    """
    balancer = Balancer({"a": None, "b": None})
    server, _ = balancer.acquire_server("r0")
    balancer.remove_servers([server])
    balancer.add_servers({server: None})
    balancer.acquire_server("r0")  # a second request on it, while the first one still runs
    balancer.release_server(server)  # the first one ends
    count = balancer.get_inflight_count(server)
    print(VERSION, f"one request runs on the server; the balancer counts {count}")


async def hole() -> Any:
    """The reply to a request of three calls, of which the second came without routes.

    SGLang replies so when a request is aborted in its waiting queue after a retraction: tokens and
    logprobs, no ``routed_experts``.
    """
    import torch

    def without_step_2(rows: Any) -> Any:
        return None if rows[-1, 0, 0] // 100 == 2 else torch.as_tensor(rows)

    script = (2, "abort", 1), (2, "abort", 2), (2, "stop", 3)
    return await generate(Server(*script, routes=without_step_2), [1, 2], max_tokens=8)


async def route_hole() -> None:
    """A segment without routes leaves a hole that is closed: later rows move to earlier positions,
    and nothing reports it.
    """
    out = await hole()
    steps, rows = [token // 100 for token in out.token_ids], out.routed_experts[:, 0, 0]
    print(VERSION, f"prompt 2 + tokens of steps {steps} need 7 rows; there are {len(rows)}")
    print(VERSION, f"row i was computed for position {[int(row) % 100 for row in rows]}")


async def short_logprobs() -> None:
    """Missing logprobs are filled with 0.0 under a loss mask of 1: the trainer reads a probability
    of 1.
    """
    tensors = await batch([sample([3, 4, 5], response_logprobs=[-1.5])])
    logprobs = tensors["rollout_log_probs"][0, :3].tolist()
    mask = tensors["response_mask"][0, :3].tolist()
    print(VERSION, f"1 logprob for 3 tokens; rollout_log_probs {logprobs} mask {mask}")


async def stop_reason() -> None:
    """A response that ends by itself on the last token of its budget is reported as cut off by
    ``length``.
    """
    for name, script in {
        "one call": [(3, "stop", 1)],
        "resumed": [(2, "abort", 1), (1, "stop", 1)],
    }.items():
        out = await generate(Server(*script, routes=no_routes), [1], max_tokens=3)
        print(
            VERSION,
            f"{name}: the server said {script[-1][1]} - the client says {out.stop_reason}",
        )


def surplus_rows() -> None:
    """Route rows, logprobs and masks of the wrong length are cut or padded without a warning on the
    way into a batch.
    """
    out = sample(
        [3, 4],
        response_mask=[1, 1, 1],
        response_logprobs=[-1.0],
        routed_experts=np.arange(7)[:, None, None],
    )
    fields = {
        name: list(value.shape) for name, value in out.as_dict().items() if hasattr(value, "shape")
    }
    print(VERSION, f"2 + 2 tokens with 3 mask entries, 1 logprob, 7 rows: {fields}")


async def tag_order() -> None:
    """min and max are the first and the last tag seen: if a request moves to a replica with older
    weights, min is above max.
    """
    server = Server((2, "aborted", 5), (1, "completed", 4), routes=no_routes)
    out = await generate(server, [1], max_tokens=8)
    tags = {key: tag for key, tag in out.extra_fields.items() if "m" in key and "steps" in key}
    print(VERSION, f"sampled by steps {[token // 100 for token in out.token_ids]} {tags}")


async def turn_budget() -> None:
    """A later turn of ToolAgentLoop is granted more than the response has room for; what is sampled
    beyond it is thrown away.
    """
    server = Server((5, "completed", 1), (9, "completed", 1))
    out = await tool_loop(server, "21 22")
    room = f"response_length {LENGTH} - turn 1 sampled 5, the tool gave 2: room for 1"
    print(VERSION, f"{room}; turn 2 was granted {server.granted[1]}")
    print(VERSION, f"sampled {5 + server.granted[1]} tokens, delivered {sum(out.response_mask)}")


def update_failure() -> None:
    """A weight transfer that fails leaves every replica paused and without KV cache: nothing in
    ``update_weights`` resumes them.
    """
    engine, replica = manager(fails=True)
    try:
        engine.update_weights(2)
    except RuntimeError as error:
        print(VERSION, f"after {error!r}: paused {replica.paused}, KV cache there {replica.kv}")


async def update_overlap() -> None:
    """Updates are not serialized: one that overlaps another loads into a serving replica, or is
    overwritten by older weights.
    """
    engine, replica = manager()
    first = asyncio.create_task(engine.update_weights(2))
    await asyncio.sleep(0.025)  # the first one is giving the KV cache back
    await asyncio.gather(first, engine.update_weights(3))
    state = f"the replica was {replica.loaded} when its weights changed"
    print(VERSION, f"the second update starts while the first resumes: {state}")
    # abort, abort, and a release that takes longer for the first update
    engine, replica = manager(0.01, 0.01, 0.02)
    await asyncio.gather(engine.update_weights(2), engine.update_weights(3))
    print(VERSION, f"updates to steps 2 and 3 at once: the replica ends on step {replica.step}")


def update_unlabelled() -> None:
    """``update_weights()`` without a step, as trainer_base.py calls it before validation: new
    weights, served under the old tag.
    """
    engine, replica = manager()
    engine.update_weights()  # runs an event loop of its own
    loads = f"weights loaded {len(replica.loaded)} time after step 1"
    print(VERSION, f"{loads}; the server still tags with step {replica.step}")


async def zero_rows() -> None:
    """``as_dict`` fills every row that is missing at the end with zeros without a warning: expert
    0, top_k times, is a legal choice to replay, here for two of the sampled tokens.
    """
    out = await hole()
    rows = sample(out.token_ids, routed_experts=np.asarray(out.routed_experts)).as_dict()
    experts = rows["routed_experts"][:, 0, 0].tolist()
    print(VERSION, f"7 rows needed for 2 + 6 tokens, 5 there; as_dict gives {experts}")


def corrected(old: float, rollout: float, padding: int, **options: Any) -> Any:
    """One response of two tokens, and rows that pad the batch to a multiple."""
    mask = torch.tensor([[1, 1]] + [[0, 0]] * padding)
    helper = "compute_rollout_correction_and_rejection_mask"
    return getattr(rollout_corr_helper, helper)(
        torch.full(mask.shape, old) * mask, torch.full(mask.shape, rollout) * mask, mask, **options
    )


def empty_rows() -> None:
    """Rows without a trained token, which pad a batch, are counted in means over sequences."""
    for padding in (0, 3):
        numbers = corrected(-2.0, -1.0, padding, rollout_is="token")[2]
        names = ("rollout_is_seq_mean", "rollout_is_seq_min", "training_ppl")
        shown = {name: round(numbers[f"rollout_corr/{name}"], 3) for name in names}
        print(VERSION, f"{padding} rows of padding: {shown}")


def icepop_drops_all() -> None:
    """If IcePop drops every token of a batch, its metrics divide by 0."""
    try:
        corrected(-1.0, -3.0, 0, rollout_is="sequence", rollout_is_threshold="0.5_5.0")
    except ZeroDivisionError as error:
        print(VERSION, f"one response with a ratio of e**4, a band of 0.5 to 5: {error}")


if __name__ == "__main__":
    run(
        budget,
        caller_params,
        cut_tag,
        dead_server,
        empty_padding,
        empty_rows,
        empty_turn,
        icepop_drops_all,
        logprob_gap,
        min_tag,
        mixed_batch,
        multi_turn_routes,
        numpy_routes,
        partial_off,
        readd_server,
        route_hole,
        short_logprobs,
        stop_reason,
        surplus_rows,
        tag_order,
        turn_budget,
        update_failure,
        update_overlap,
        update_unlabelled,
        zero_rows,
    )
