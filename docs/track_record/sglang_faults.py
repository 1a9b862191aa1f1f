"""Faults of SGLang: `python docs/track_record/sglang_faults.py [NAME ...]`.

SGLang runs unmodified on a tiny random Qwen3-MoE (or what TRACK_RECORD_MODEL names), on a CPU with
rollproof's stubs of SGLang's CUDA kernels and nothing else of it. One engine serves all faults but
those that end it, which have a process of their own.

SGLang spawns its processes, so this module does its work below ``if __name__ == "__main__"``.
"""

import asyncio
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from common import run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.update(
        SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", SGLANG_CPU_OMP_THREADS_BIND="0"
    )
    from rollproof.engines.sglang import sglang_cpu

    sglang_cpu.install()

import sglang
import sglang.srt.entrypoints.engine
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
)

VERSION = f"sglang {metadata.version('sglang')}:"
KIND = os.environ.get("TRACK_RECORD_MODEL", "qwen3_moe")
_MODELS = Path(sglang.__file__).parent.glob("srt/models/*.py")
# the other models take half of a start
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
    file.stem for file in _MODELS if file.stem != KIND
)
PROMPT = list(range(5, 15))


def scheduler(*arguments: Any) -> None:
    """SGLang's scheduler, in a child: importing this module there puts the stubs in place first."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*arguments)


def detokenizer(*arguments: Any) -> None:
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments)


class Engine(sglang.srt.entrypoints.engine.Engine):
    run_scheduler_process_func = staticmethod(scheduler)
    run_detokenizer_process_func = staticmethod(detokenizer)


@functools.cache
def checkpoint() -> str:
    """The folder of the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    layers: dict[str, Any] = {}
    if KIND == "mellum":
        layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
        layers = {"layer_types": layer_types, "sliding_window": 16}
    config = AutoConfig.for_model(
        KIND,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=512,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        **layers,
    )
    torch.manual_seed(0)
    folder = tempfile.mkdtemp(prefix="track-record-")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@functools.cache
def engine() -> Any:
    return Engine(
        model_path=checkpoint(),
        device=DEVICE,
        dtype="float32",
        skip_tokenizer_init=True,
        random_seed=0,
        context_length=512,
        attention_backend="torch_native" if DEVICE == "cpu" else "triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        skip_server_warmup=True,
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        max_running_requests=4,
        enable_return_routed_experts=True,
        weight_version="w0",
        log_level="error",
    )


def call(rid: str, tokens: int, *, n: int = 1, **more: Any) -> Any:
    """Send a call; a task of its reply, or of its last chunk."""
    request = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "n": n},
        "rid": rid,
        "return_logprob": True,
        "return_routed_experts": True,
        **more,
    }

    async def reply() -> Any:
        result = await engine().async_generate(**request)
        if more.get("stream"):
            async for chunk in result:
                last = chunk
            return last
        return result

    return asyncio.ensure_future(reply())


async def pause(mode: str) -> None:
    await engine().tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
    await engine().tokenizer_manager.get_internal_state()  # the scheduler has seen the pause


async def resume() -> None:
    await engine().tokenizer_manager.continue_generation(
        ContinueGenerationReqInput(torch_empty_cache=False)
    )


def abort(rid: str) -> None:
    engine().tokenizer_manager.abort_request(rid=rid)


def summary(reply: dict[str, Any]) -> str:
    """How a reply ended, and how much of it there is."""
    meta = reply["meta_info"]
    routes = "with routes" if "routed_experts" in meta else "without routes"
    end = meta["finish_reason"]["type"]
    return f"finish {end}, {len(reply['output_ids'])} tokens, {routes}"


def on_engine(fault: Callable[[], Any]) -> Callable[[], None]:
    """Run an asynchronous fault on the engine's loop."""

    @functools.wraps(fault)
    def runs() -> None:
        engine()
        engine().loop.run_until_complete(fault())

    return runs


def run_in_child(name: str, *errors: str, **environment: str) -> tuple[int, list[str], list[str]]:
    """Run an ending of this module in a process of its own.

    Returns:
        Its exit code, the lines that it printed, and those of its errors.
    """
    child = subprocess.run(  # noqa: S603 - this script
        [sys.executable, __file__, "ending", name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    lines = (child.stdout + child.stderr).splitlines()
    return (
        child.returncode,
        child.stdout.splitlines(),
        [line for line in lines if line.startswith(errors)],
    )


@on_engine
async def _beyond_vocabulary() -> None:
    call("other", 400)
    await asyncio.sleep(0.5)
    # the model has 512 tokens: 0 to 511
    await asyncio.wait([call("mine", 4, input_ids=[5, 512])], timeout=20)
    print("alive")


def beyond_vocabulary() -> None:
    """One token id beyond the vocabulary in a request ends the whole engine and every call in
    flight.
    """
    code, _, errors = run_in_child("_beyond_vocabulary", "IndexError", "RuntimeError", "alive")
    end = f"the process that holds the engine ended with {code} after"
    print(VERSION, end, *errors[:1])


@on_engine
async def _flush_in_place() -> None:
    call("mine", 400)
    await asyncio.sleep(0.5)
    await pause("in_place")
    # flush_cache is true by default
    await engine().tokenizer_manager.update_weights_from_disk(
        UpdateWeightFromDiskReqInput(model_path=checkpoint()), None
    )
    await asyncio.sleep(20)


def flush_in_place() -> None:
    """A weight update with default arguments, while calls are paused in place, ends the whole
    engine and every call in flight.
    """
    code, _, errors = run_in_child("_flush_in_place", "AssertionError")
    print(VERSION, f"the process that holds the engine ended with {code} after", *errors)


@on_engine
async def incremental_abort() -> None:
    """An abort of a retracted call that is streamed in parts repeats its last token, and every
    logprob.
    """
    # as `--incremental-streaming-output`
    engine().tokenizer_manager.incremental_streaming_output = True
    parts = []
    async for part in await engine().async_generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 200, "ignore_eos": True},
        return_logprob=True,
        rid="cut",
        stream=True,
    ):
        parts.append(part)
        if len(parts) == 8:
            await pause("retract")
            abort("cut")
    await resume()
    engine().tokenizer_manager.incremental_streaming_output = False
    *before, last = parts
    sampled = [token for part in before for token in part["output_ids"]]
    count = last["meta_info"]["completion_tokens"]
    again = last["output_ids"] == sampled[-1:]
    logprobs = len(last["meta_info"]["output_token_logprobs"]) == count
    first = f"before the abort's part: every sampled token: {count == len(sampled)}"
    second = f"in it the last token once more: {again}"
    print(VERSION, f"{first}; {second}, and logprobs of all tokens once more: {logprobs}")


@on_engine
async def no_budget() -> None:
    """A call that may sample nothing (max_new_tokens=0), computed together with another, returns
    the logprob of a token that was thrown away.
    """
    await call("warm", 3)
    for name, others in (("alone", 0), ("beside others", 2)):
        calls = [call(f"{name} {number}", 3) for number in range(others)]
        reply, *_ = await asyncio.gather(call(f"nothing {name}", 0), *calls)
        logprobs = len(reply["meta_info"]["output_token_logprobs"])
        print(VERSION, f"{name}: {len(reply['output_ids'])} tokens, {logprobs} logprobs")


@on_engine
async def parked_abort() -> None:
    """An abort of a call that waits for the end of a pause is forgotten, and so is every later
    abort of that call: it runs to its end.
    """
    await pause("abort")
    parked = call("parked", 200)
    await asyncio.sleep(0.5)
    abort("parked")
    await asyncio.sleep(0.5)
    state = "answered" if parked.done() else "not answered"
    print(VERSION, f"half a second after its abort the parked call is {state}")
    await resume()
    await asyncio.sleep(0.3)
    abort("parked")
    print(VERSION, f"resumed, and aborted once more: {summary(await parked)}")


@on_engine
async def prefix_abort() -> None:
    """An abort of a request id ends every call with an id that begins with it: aborting "1" aborts
    "10", too.
    """
    calls = {"1": call("1", 400), "10": call("10", 400)}
    await asyncio.sleep(1)
    abort("1")
    for name, task in calls.items():
        end = (await task)["meta_info"]["finish_reason"]["type"]
        print(VERSION, f"call {name!r}: finish {end}")


@on_engine
async def retracted_abort() -> None:
    """An abort of a call that was retracted loses its routes, and unless it is streamed the tokens
    that it had sampled.
    """
    for stream in (False, True):
        cut, other = call(f"cut-{stream}", 40, stream=stream), call(f"other-{stream}", 40)
        await asyncio.sleep(0.25)
        await pause("retract")
        abort(f"cut-{stream}")
        reply = await cut
        await resume()
        retracted = (await other)["meta_info"]["num_retractions"]
        tokens = "some" if reply["output_ids"] else "no"
        routes = "routes" if "routed_experts" in reply["meta_info"] else "no routes"
        neighbour = f"a call beside it was retracted {retracted} time"
        name = "streamed" if stream else "not streamed"
        print(VERSION, f"{name}: {tokens} tokens, {routes} - {neighbour}")


@on_engine
async def samples_abort() -> None:
    """A call of several samples (n > 1) cannot be aborted by its id: the samples run under ids that
    the caller never learns.
    """
    task = call("mine", 200, n=2)
    await asyncio.sleep(0.5)
    abort("mine")
    for number, reply in enumerate(await task):
        print(VERSION, f"sample {number}: {summary(reply)}")


@on_engine
async def samples_leak() -> None:
    """A streamed call of several samples (n > 1) leaves all entries but one in the table of open
    calls for good: the server never drains.
    """
    for stream in (False, True):
        await call(f"samples-{stream}", 3, n=4, stream=stream)
        await asyncio.sleep(1)  # finished calls leave the table a moment later
        count = len(engine().tokenizer_manager.rid_to_state)
        name = "streamed" if stream else "not streamed"
        print(VERSION, f"{name}: {count} open calls a second later")


@on_engine
async def _sliding_pool() -> None:
    # 4096 slots for full attention, 3276 for sliding attention
    for number in range(24):
        print(f"served {200 * number} tokens", flush=True)
        ids = [5 + number] * 199
        await asyncio.wait([call(f"mine {number}", 1, input_ids=ids)], timeout=20)


def sliding_pool() -> None:
    """On the torch_native backend a model with a KV pool for sliding attention reads that pool by
    the slots of the other: it ends, or is wrong.
    """
    code, printed, errors = run_in_child("_sliding_pool", "IndexError", TRACK_RECORD_MODEL="mellum")
    served = [line for line in printed if line.startswith("served")][-1]
    end = f"the process that holds the engine ended with {code} after"
    print(VERSION, f"Mellum, {served}: {end}", *errors[:1])


if __name__ == "__main__" and sys.argv[1:2] == ["ending"]:
    {
        "_beyond_vocabulary": _beyond_vocabulary,
        "_flush_in_place": _flush_in_place,
        "_sliding_pool": _sliding_pool,
    }[sys.argv[2]]()
elif __name__ == "__main__":
    run(
        beyond_vocabulary,
        flush_in_place,
        incremental_abort,
        no_budget,
        parked_abort,
        prefix_abort,
        retracted_abort,
        samples_abort,
        samples_leak,
        sliding_pool,
    )
