"""vLLM's mode of batch invariance: of 60,000 rows, how many are normalised to other bits in larger steps than in one of 200 tokens."""

import os

os.environ["VLLM_BATCH_INVARIANT"] = "1"
import torch
import vllm
from vllm import _custom_ops as ops

generator = torch.Generator("cuda").manual_seed(0)


def normed(rows, residual, weight, name):
    out, given = (torch.empty_like(rows) if name == "rms" else rows.clone()), residual.clone()
    ops.rms_norm(out, rows, weight, 1e-6) if name == "rms" else ops.fused_add_rms_norm(
        out, given, weight, 1e-6
    )
    return out


for name, hidden in (
    (name, hidden) for name in ("rms", "fused") for hidden in (64, 128, 512, 1024, 2048, 4096)
):
    weight, differ = (
        torch.ones(hidden, device="cuda", dtype=torch.bfloat16),
        dict.fromkeys((254, 255, 256, 257, 512), 0),
    )
    for _ in range(300):
        rows, residual = (
            torch.randn(512, hidden, device="cuda", generator=generator).to(torch.bfloat16)
            for _ in range(2)
        )
        small = normed(rows[:200], residual[:200], weight, name)
        for size in differ:
            differ[size] += int(
                (normed(rows[:size], residual[:size], weight, name)[:200] != small).any(-1).sum()
            )
    print(f"vllm {vllm.__version__}: {name} {hidden} of 60000 rows other bits: {differ}")
