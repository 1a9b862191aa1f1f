"""Samples with a tiny model in bf16: its rollouts as trace.json, its checkpoint in policy/. Needs torch and transformers."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import rollproof
from rollproof.fakes.tiny_models import make_checkpoint
from rollproof.replay.hf import hf_record

PROMPT, TOKENS = 8, 40
contract = rollproof.Contract(
    rows="T-1", provenance="as-sampled", resume="none", abort_surfaces=False, versions="none", logprobs="raw",
    layer_axis="all", num_layers=4, moe_layers=(0, 1, 2, 3), num_experts=8, top_k=2, filler="none", dtype="int64", kv_policy="recompute",
)  # fmt: skip
make_checkpoint("policy", "qwen3_moe")
engine = AutoModelForCausalLM.from_pretrained("policy", dtype=torch.bfloat16).eval()
random = torch.Generator().manual_seed(0)


def generate(prompt_ids: list[int]) -> tuple[list[int], list[float], np.ndarray]:
    """Ids and logprobs of the tokens that were sampled, and the experts of every forward: what an engine with routes returns."""
    ids, logprobs = torch.tensor([prompt_ids]), []
    with torch.no_grad():
        for _ in range(TOKENS):
            law = torch.log_softmax(engine(ids).logits[0, -1].float(), -1)
            picked = torch.multinomial(law.exp(), 1, generator=random)
            logprobs.append(float(law[picked]))
            ids = torch.cat([ids, picked[None]], 1)
        with hf_record(engine) as recorded:
            engine(ids[:, :-1])
    return ids[0, PROMPT:].tolist(), logprobs, recorded.routes.numpy()


with rollproof.record(contract, save="trace.json") as trace:
    for number in range(32):
        prompt = torch.randint(3, 512, (PROMPT,), generator=random).tolist()
        trace.submit(rollproof.Request(request_id=f"r{number}", prompt_ids=tuple(prompt), max_tokens=TOKENS, sampling={"temperature": 1.0}))
        tokens, logprobs, routes = generate(prompt)
        trace.result(
            rollproof.Rollout(
                request_id=f"r{number}",
                prompt_ids=tuple(prompt),
                response_ids=tuple(tokens),
                logprobs=np.array(logprobs),
                routes=routes,
                finish_reason=rollproof.FinishReason.LENGTH,
            )
        )
