"""An SGLang engine on a tiny random Qwen3-MoE (or what TRACK_RECORD_MODEL names), unmodified; on a CPU with rollproof's stand-ins for SGLang's CUDA kernels and nothing else of it.

SGLang spawns its processes: a script that uses this must do its work below ``if __name__ == "__main__"``. One engine serves all
scripts of a process.
"""

import asyncio
import functools
import os
import tempfile
from importlib import metadata
from pathlib import Path

import torch

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
OTHERS = [
    file.stem for file in Path(sglang.__file__).parent.glob("srt/models/*.py") if file.stem != KIND
]
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(OTHERS)  # they take half of a start
PROMPT = list(range(5, 15))


def scheduler(*args):
    """Runs in a child: that this module is imported there puts the stand-ins in place first."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*args)


def detokenizer(*args):
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args)


class Engine(sglang.srt.entrypoints.engine.Engine):
    run_scheduler_process_func = staticmethod(scheduler)
    run_detokenizer_process_func = staticmethod(detokenizer)


@functools.cache
def checkpoint():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    experts = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 512,
    }
    layers = (
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 16,
        }
        if KIND == "mellum"
        else {}
    )
    config = AutoConfig.for_model(
        KIND, **sizes, **experts, **layers, norm_topk_prob=True, max_position_embeddings=2048
    )
    torch.manual_seed(0)
    folder = tempfile.mkdtemp(prefix="track-record-")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@functools.cache
def engine():
    return Engine(
        model_path=checkpoint(), device=DEVICE, dtype="float32", skip_tokenizer_init=True, random_seed=0, context_length=512,
        attention_backend="torch_native" if DEVICE == "cpu" else "triton", sampling_backend="pytorch", grammar_backend="none",
        disable_overlap_schedule=True, disable_cuda_graph=True, skip_server_warmup=True, mem_fraction_static=0.1, max_total_tokens=4096,
        max_running_requests=4, enable_return_routed_experts=True, weight_version="w0", log_level="error",
    )  # fmt: skip


def call(rid, tokens, **more):
    """A call that is sent: a task of its reply, or of its last chunk."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "n": more.pop("n", 1)}
    asked = {
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "rid": rid,
        "return_logprob": True,
        "return_routed_experts": True,
        **more,
    }

    async def run():
        reply = await engine().async_generate(**asked)
        if more.get("stream"):
            async for chunk in reply:
                last = chunk
            reply = last
        return reply

    return asyncio.ensure_future(run())


async def pause(mode):
    await engine().tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
    await engine().tokenizer_manager.get_internal_state()  # the scheduler has seen it


async def resume():
    await engine().tokenizer_manager.continue_generation(
        ContinueGenerationReqInput(torch_empty_cache=False)
    )


async def update(**more):
    return await engine().tokenizer_manager.update_weights_from_disk(
        UpdateWeightFromDiskReqInput(model_path=checkpoint(), **more), None
    )


def abort(rid):
    engine().tokenizer_manager.abort_request(rid=rid)


def told(reply):
    """How a reply ended, and how much of it there is."""
    meta = reply["meta_info"]
    kept = "with routes" if "routed_experts" in meta else "without routes"
    return f"finish {meta['finish_reason']['type']}, {len(reply['output_ids'])} tokens, {kept}"


def run(main):
    engine().loop.run_until_complete(main())
