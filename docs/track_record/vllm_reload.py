"""vLLM on a CPU: `reload_weights` of the very checkpoint that is loaded changes what a MoE model computes."""

import os
import tempfile
from importlib import metadata

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
os.environ.update(TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1")

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams

sizes = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
torch.manual_seed(0)
config = AutoConfig.for_model(
    "qwen3_moe", **sizes, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
)
model = AutoModelForCausalLM.from_config(config)
for parameter in model.parameters():
    if parameter.dim() > 1:
        parameter.data.normal_(std=1.5 * parameter.shape[-1] ** -0.5)

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    llm = LLM(model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=128, enable_prefix_caching=False)
    layers = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.model.layers
    outputs = {}
    for name, module in (("attention", layers[0].self_attn), ("experts", layers[0].mlp.experts)):
        module.register_forward_hook(lambda _m, _i, out, name=name: outputs.setdefault(name, out.detach().clone()))

    def run():
        outputs.clear()
        params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
        (one,) = llm.generate([{"prompt_token_ids": list(range(5, 25))}], params, use_tqdm=False)[0].outputs
        return dict(outputs), [(token, round(entry[token].logprob, 3)) for token, entry in zip(one.token_ids, one.logprobs, strict=True)]

    (before, said), (again, repeated) = run(), run()
    llm.collective_rpc("reload_weights")  # the checkpoint that is loaded already
    after, changed = run()
    version = metadata.version("vllm-cpu")
    print(f"vllm-cpu {version}: greedy {said}, again {repeated}, after the reload {changed}")
    moved = {name: float((before[name] - after[name]).abs().max()) for name in before}
    print(f"vllm-cpu {version}: outputs of layer 0 differ by", {name: round(size, 3) for name, size in moved.items()})
