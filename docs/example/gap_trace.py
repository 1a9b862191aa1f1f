"""Samples with a tiny model in bf16: its rollouts as trace.json, its checkpoint in policy/. Needs torch and transformers."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import rollproof
from rollproof.fakes.tiny_models import make_checkpoint
from rollproof.replay.hf import hf_record

COUNT, PROMPT, TOKENS = 64, 8, 40
contract = rollproof.Contract(
    rows="T-1", provenance="as-sampled", resume="none", abort_surfaces=False, versions="none", logprobs="raw",
    layer_axis="all", num_layers=4, moe_layers=(0, 1, 2, 3), num_experts=8, top_k=2, filler="none", dtype="int64", kv_policy="recompute",
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(
    make_checkpoint("policy", "qwen3_moe"), dtype=torch.float32
).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.mul_(
                0.2
            )  # in a random network of full gain rounding grows into chaos; in a trained one it does not
model.save_pretrained("policy")
engine = model.to(torch.bfloat16)
random = torch.Generator().manual_seed(0)


def generate(prompts: torch.Tensor) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Prompts with what was sampled, its logprobs, and the experts of every forward: what an engine with routes returns."""
    ids, logprobs = prompts, []
    with torch.no_grad():
        for _ in range(TOKENS):
            law = torch.log_softmax(engine(ids).logits[:, -1].float(), -1)
            picked = torch.multinomial(law.exp(), 1, generator=random)
            logprobs.append(law.gather(1, picked).numpy())
            ids = torch.cat([ids, picked], 1)
        with hf_record(engine) as recorded:
            engine(ids[:, :-1])
    return (
        ids,
        np.concatenate(logprobs, axis=1),
        recorded.routes.numpy().reshape(COUNT, PROMPT + TOKENS - 1, 4, 2),
    )


with rollproof.record(contract, save="trace.json") as trace:
    prompts = torch.randint(3, 512, (COUNT, PROMPT), generator=random)
    requests = [
        rollproof.Request(
            request_id=f"r{i}",
            prompt_ids=tuple(prompt),
            max_tokens=TOKENS,
            sampling={"temperature": 1.0},
        )
        for i, prompt in enumerate(prompts.tolist())
    ]
    for request in requests:
        trace.submit(request)
    for request, ids, logprobs, routes in zip(requests, *generate(prompts), strict=True):
        trace.result(
            rollproof.Rollout(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                response_ids=tuple(ids[PROMPT:].tolist()),
                logprobs=logprobs,
                routes=routes,
                finish_reason=rollproof.FinishReason.LENGTH,
            )
        )
