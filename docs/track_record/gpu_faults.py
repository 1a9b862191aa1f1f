"""Faults of vLLM and SGLang on a GPU, one at a time: `python docs/track_record/gpu_faults.py NAME`.

The engines run as they are installed, on a tiny random Qwen3-MoE.
"""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from common import run

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # a child forked from a process that has used torch waits for ever
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
}


def model() -> str:
    """The folder of the model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    path = Path(tempfile.gettempdir()) / f"by-hand-{os.getpid()}"
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


def sglang_engine(**options: Any) -> tuple[Any, str]:
    """``sglang.Engine``, and its version in words."""
    import sglang

    engine = sglang.Engine(
        model_path=model(),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend="triton",
        sampling_backend="pytorch",
        moe_runner_backend="triton",
        grammar_backend="none",
        disable_cuda_graph=True,
        skip_server_warmup=True,
        log_level="error",
        enable_return_routed_experts=True,
        mem_fraction_static=0.4,
        **options,
    )
    return engine, f"sglang {sglang.__version__}:"


def sglang_paused() -> None:
    """During a pause the cache is not cleared while retracted calls wait, and a call that is
    aborted while it waits gets an exception.
    """
    engine, version = sglang_engine(max_running_requests=8, max_total_tokens=4096)
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    def call(rid: str, tokens: int) -> Any:
        params = {"max_new_tokens": tokens, "ignore_eos": True}
        ids = list(range(5, 15))
        reply = engine.async_generate(input_ids=ids, rid=rid, sampling_params=params)
        return asyncio.ensure_future(reply)

    async def main() -> None:
        manager, running = engine.tokenizer_manager, call("running", 2000)
        await asyncio.sleep(3)
        await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        emptied = (await manager.flush_cache()).success
        print(version, f"the cache is emptied beside a retracted call: {emptied}", flush=True)
        parked = call("parked", 4)
        await asyncio.sleep(0.5)
        manager.abort_request(rid="parked")
        await manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        await asyncio.wait([parked], timeout=20)
        end = parked.exception() or parked.result()["meta_info"]["finish_reason"]
        print(version, f"a waiting call, aborted: {repr(end)[:90]}", flush=True)
        running.cancel()

    engine.loop.run_until_complete(main())
    engine.shutdown()


def sglang_unchunked() -> None:
    """Without chunked prefill, more tokens of prompt than the engine runs requests end it, if it
    returns routed experts.
    """
    engine, version = sglang_engine(chunked_prefill_size=-1, max_running_requests=16)
    params = {"max_new_tokens": 2, "ignore_eos": True}
    for length in (16, 17):
        print(version, f"a prompt of {length} tokens, at most 16 requests:", end=" ", flush=True)
        ids = list(range(10 * length, 11 * length))  # of its own: a cached prefix is not computed
        reply = engine.generate(input_ids=ids, sampling_params=params, return_routed_experts=True)
        print(len(reply["output_ids"]), "tokens sampled", flush=True)


def vllm_invariant_norm() -> None:
    """vLLM's mode of batch invariance: of 60,000 rows, how many are normalised to other bits in
    larger steps than in one of 200 tokens.
    """
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import torch
    import vllm
    from vllm import _custom_ops as ops

    generator = torch.Generator("cuda").manual_seed(0)

    def normed(rows: Any, residual: Any, weight: Any, name: str) -> Any:
        if name == "rms":
            out = torch.empty_like(rows)
            ops.rms_norm(out, rows, weight, 1e-6)
        else:
            out = rows.clone()
            ops.fused_add_rms_norm(out, residual.clone(), weight, 1e-6)
        return out

    def drawn(hidden: int) -> Any:
        return torch.randn(512, hidden, device="cuda", generator=generator).to(torch.bfloat16)

    for name in ("rms", "fused"):
        for hidden in (64, 128, 512, 1024, 2048, 4096):
            weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
            differ = dict.fromkeys((254, 255, 256, 257, 512), 0)
            for _ in range(300):
                rows, residual = drawn(hidden), drawn(hidden)
                small = normed(rows[:200], residual[:200], weight, name)
                for size in differ:
                    large = normed(rows[:size], residual[:size], weight, name)[:200]
                    differ[size] += int((large != small).any(-1).sum())
            counts = f"{name} {hidden} of 60000 rows other bits: {differ}"
            print(f"vllm {vllm.__version__}: {counts}")


def vllm_merged_deltas() -> None:
    """Parts of a delta stream that are merged, because the next came before the last was fetched,
    lose the routes.
    """
    import numpy as np
    import vllm
    from vllm.outputs import CompletionOutput, RequestOutput

    def part(tokens: list[int], routes: Any = None, reason: str | None = None) -> Any:
        completion = CompletionOutput(
            0, "", tokens, None, None, routed_experts=routes, finish_reason=reason
        )
        finished = reason is not None
        return RequestOutput("r", None, [1, 2, 3], None, [completion], finished=finished)

    version = f"vllm {vllm.__version__}:"
    first, last = part([5]), part([6], np.zeros((4, 4, 2), dtype=np.uint8), "length")
    output = last.outputs[0]
    rows = len(output.routed_experts)
    print(version, f"the last part: tokens {output.token_ids}, rows {rows}")
    # RequestOutputCollector.put, for parts that were not yet fetched
    first.add(last, aggregate=True)
    output = first.outputs[0]
    print(version, f"merged: tokens {output.token_ids}, rows {output.routed_experts}")


async def vllm_prompt_start() -> None:
    """One call for rows from the end of its prompt on ends vLLM's engine core, and with it
    every call in flight.
    """
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model(),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            enable_return_routed_experts=True,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=1 << 30,
            attention_backend="TRITON_ATTN",
            moe_backend="triton",
        )
    )
    version = f"vllm {vllm.__version__}:"

    async def call(name: str, tokens: int, **more: Any) -> str:
        params = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
        async for output in engine.generate({"prompt_token_ids": list(range(5, 15))}, params, name):
            last = output.outputs[0]
        return f"{len(last.token_ids)} tokens, {len(last.routed_experts)} rows"

    fine = await call("fine", 3, routed_experts_prompt_start=9)
    print(version, f"rows from 9 of 10 on: {fine}")
    results = await asyncio.gather(
        call("other", 200),
        call("beyond", 3, routed_experts_prompt_start=10),
        return_exceptions=True,
    )
    names = " ".join(type(result).__name__ for result in results)
    print(version, f"rows from 10 of 10 on, and a call beside it: {names}")


if __name__ == "__main__":
    run(
        sglang_paused,
        sglang_unchunked,
        vllm_invariant_norm,
        vllm_merged_deltas,
        vllm_prompt_start,
    )
