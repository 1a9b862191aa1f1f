"""Scoring a head: microseconds a token and error, ours beside what else there is; on the GPU where there is one.

    python benchmarks/gap_scoring.py [--tokens 8192] [--width 2048] [--vocabulary 151936]

The reference is the float64 softmax of the float32 product of the bf16 operands, on a sample of the tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from rollproof.gap.scoring import head_kl, score


def peers(hidden: Any, head: Any, tokens: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and function of every way to score that is installed; each returns logprobs ``(tokens,)``."""
    yield "matrix product alone", lambda: chunked(hidden, head, lambda z, _: z[:, 0].float(), tokens)
    yield "rollproof", lambda: score(hidden, head, tokens).logprob
    yield "naive log_softmax, bf16 logits", lambda: torch.log_softmax((hidden @ head.t()).float(), -1).gather(1, tokens[:, None])[:, 0]
    if hidden.is_cuda:
        compiled = torch.compile(lambda z, t: z.gather(1, t[:, None])[:, 0] - torch.logsumexp(z, 1))
        yield "chunked fp32 product, torch.compile", lambda: chunked(hidden, head, compiled, tokens, fp32=True)
    with suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy

        yield "cut-cross-entropy", lambda: -linear_cross_entropy(hidden, head, tokens, reduction="none")
    with suppress(ImportError):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        yield "Liger fused linear", lambda: -Liger.apply(hidden, head, tokens, None, None, -100, 0.0, 0.0, "none")[0]


def chunked(hidden: Any, head: Any, reduce: Callable[[Any, Any], Any], tokens: Any, *, fp32: bool = False) -> Any:
    """Blocks of 1,024 tokens over the whole vocabulary."""
    out = []
    for begin in range(0, len(hidden), 1024):
        part = hidden[begin : begin + 1024]
        logits = torch.mm(part, head.t(), out_dtype=torch.float32) if fp32 else part @ head.t()
        out.append(reduce(logits, tokens[begin : begin + 1024]))
    return torch.cat(out)


def timed(call: Callable[[], Any], runs: int) -> tuple[float, float, Any]:
    """Median seconds, peak GiB beside the operands, and the result."""
    sync = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for _ in range(3 if torch.cuda.is_available() else 1):
        result = call()
    sync()
    base = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(runs):
        begun = time.perf_counter()
        result = call()
        sync()
        seconds.append(time.perf_counter() - begun)
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30 if torch.cuda.is_available() else 0.0
    return sorted(seconds)[len(seconds) // 2], peak, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 256)
    parser.add_argument("--width", type=int, default=2048 if gpu else 256)
    parser.add_argument("--vocabulary", type=int, default=151_936 if gpu else 20_000)
    parser.add_argument("--spread", type=float, default=2.0, help="standard deviation of the logits")
    parser.add_argument("--runs", type=int, default=20 if gpu else 3)
    options = parser.parse_args()
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(0)
    kind = torch.bfloat16 if gpu else torch.float32
    hidden = torch.randn(options.tokens, options.width, device=device).to(kind)
    head = (torch.randn(options.vocabulary, options.width, device=device) * (options.spread / options.width**0.5)).to(kind)
    tokens = torch.randint(options.vocabulary, (options.tokens,), device=device)
    sample = slice(0, 128)
    exact = hidden[sample].double() @ head.double().t()
    reference = torch.log_softmax(exact, -1).gather(1, tokens[sample, None])[:, 0]
    print(f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}: {options.tokens} tokens, width {options.width},"
          f" vocabulary {options.vocabulary}, {kind}")  # fmt: skip
    print(f"{'way':40} {'us/token':>9} {'GiB':>6} {'mean error':>11} {'max error':>10}")
    for name, call in peers(hidden, head, tokens):
        try:
            seconds, peak, result = timed(call, options.runs)
        except Exception as error:  # noqa: BLE001 - a peer that does not run here is told, and the others still are
            print(f"{name:40} did not run: {str(error)[:80]}")
            continue
        wrong = (result[sample].double() - reference).abs()
        errors = "" if name == "matrix product alone" else f"{wrong.mean():11.2e} {wrong.max():10.2e}"
        print(f"{name:40} {seconds / options.tokens * 1e6:9.3f} {peak:6.2f} {errors}")
    law = torch.softmax(exact, -1)
    entropy = -(law * law.log()).sum(-1)
    print(f"entropy of ours: mean error {(score(hidden[sample], head, tokens[sample]).entropy.double() - entropy).abs().mean():.2e}")
    other = (hidden.float() * 1.01).to(kind)
    seconds, peak, result = timed(lambda: head_kl(hidden, head, other, head), options.runs)
    second = torch.log_softmax(other[sample].double() @ head.double().t(), -1)
    expected = (law * (law.log() - second)).sum(-1)
    wrong = (result[sample].double() - expected).abs()
    errors = f"{wrong.mean():11.2e} {wrong.max():10.2e}"
    print(f"{'full-vocabulary KL of two heads':40} {seconds / options.tokens * 1e6:9.3f} {peak:6.2f} {errors}")


if __name__ == "__main__":
    main()
