"""Not a reproduction: a tiny Qwen3-MoE for the engines, and how they are started on one GPU."""

import os
import tempfile
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ |= {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn"
}  # a child forked from a process that has used torch waits for ever
os.environ |= {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SGLANG = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
}
SGLANG |= {
    "moe_runner_backend": "triton",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
}
SGLANG |= {"log_level": "error", "enable_return_routed_experts": True, "mem_fraction_static": 0.4}
VLLM = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "enable_return_routed_experts": True,
}
VLLM |= {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "attention_backend": "TRITON_ATTN",
    "moe_backend": "triton",
}


def model():
    """The folder of the model, written once."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = Path(tempfile.gettempdir()) / f"by-hand-{os.getpid()}"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, tie_word_embeddings=False)).save_pretrained(path)
    return str(path)


def sglang_engine(**options):
    """``sglang.Engine``, and its version in words."""
    import sglang

    return sglang.Engine(model_path=model(), **SGLANG, **options), f"sglang {sglang.__version__}:"
