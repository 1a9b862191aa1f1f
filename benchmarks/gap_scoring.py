"""Scoring a head: microseconds a token and error, ours next to other methods; on the GPU where
there is one.

python benchmarks/gap_scoring.py [--tokens 8192] [--width 2048] [--vocabulary 151936] [--only
NAME...]

All rows of a table are of one run and get the same operands. Peers that this host lacks, or that do
not run on it, are reported as such. The reference is the float64 softmax of the float64 product of
the operands, on a sample of the tokens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rollproof.gap.scoring import head_kl, score

Way = Callable[[Any, Any, Any], Any]
"""From hidden states ``(tokens, width)``, head ``(vocabulary, width)`` and ids ``(tokens,)`` to
logprobs ``(tokens,)``.
"""


def chunked(reduce: Callable[[Any, Any], Any], *, fp32: bool = False) -> Way:
    """Blocks of 1,024 tokens over the complete vocabulary."""

    def way(hidden: Any, head: Any, tokens: Any) -> Any:
        out = []
        exact = fp32 and hidden.is_cuda
        for begin in range(0, len(hidden), 1024):
            part = hidden[begin : begin + 1024]
            logits = torch.mm(part, head.t(), out_dtype=torch.float32) if exact else part @ head.t()
            out.append(reduce(logits, tokens[begin : begin + 1024]))
        return torch.cat(out)

    return way


def product() -> Way:
    return chunked(lambda z, _: z[:, 0].float())


def ours() -> Way:
    return lambda hidden, head, tokens: score(hidden, head, tokens).logprob


def naive() -> Way:
    return lambda hidden, head, tokens: torch.log_softmax((hidden @ head.t()).float(), -1).gather(
        1, tokens[:, None]
    )[:, 0]


def _picked(z: Any, t: Any) -> Any:
    return z.gather(1, t[:, None])[:, 0] - torch.logsumexp(z, 1)


def chunks_fp32() -> Way:
    return chunked(_picked, fp32=True)


def compiled() -> Way:
    return chunked(torch.compile(_picked), fp32=True)


def cut_cross_entropy() -> Way:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, head, tokens: (
        -linear_cross_entropy(hidden, head, tokens, reduction="none")
    )


def liger() -> Way:
    from liger_kernel.ops.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyFunction as Function,
    )

    return lambda hidden, head, tokens: (
        -Function.apply(hidden, head, tokens, None, None, -100, 0.0, 0.0, "none")[0]
    )


def liger_scaled() -> Way:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction as Function,
    )

    return lambda hidden, head, tokens: -_first(Function.apply(hidden, head, tokens))


def flash_attention() -> Way:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return lambda hidden, head, tokens: -cross_entropy_loss(hidden @ head.t(), tokens)[0]


def trl_selective() -> Way:
    from trl.kernels import selective_log_softmax_and_entropy

    return lambda hidden, head, tokens: selective_log_softmax_and_entropy(
        (hidden @ head.t())[None], tokens[None]
    )[0][0]


def trl_chunked() -> Way:
    from trl.kernels import ChunkedLogProbFunction

    return lambda hidden, head, tokens: ChunkedLogProbFunction.apply(
        hidden, head, None, tokens, 1.0, 8192, None, 1.0, ()
    )[0]


def verl_torch() -> Way:
    from verl.utils.experimental.torch_functional import FusedLinearForPPOFunction

    return lambda hidden, head, tokens: FusedLinearForPPOFunction.apply(
        hidden, head, tokens, 1.0, 512
    )[0]


def verl_triton() -> Way:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda hidden, head, tokens: linear_cross_entropy(hidden, head, tokens, 1.0, "none")[0]


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


WAYS: Mapping[str, tuple[str, Callable[[], Way]]] = {
    "matrix product alone": ("torch", product),
    "rollproof": ("rollproof", ours),
    "naive log_softmax, float of bf16 logits": ("torch", naive),
    "chunked fp32 product, logsumexp": ("torch", chunks_fp32),
    "chunked fp32 product, torch.compile": ("torch", compiled),
    "cut-cross-entropy": ("cut-cross-entropy", cut_cross_entropy),
    "Liger fused linear": ("liger-kernel", liger),
    "Liger fused scaled (CuTe DSL)": ("liger-kernel", liger_scaled),
    "flash-attn cross entropy": ("flash-attn", flash_attention),
    "TRL selective_log_softmax (triton)": ("trl", trl_selective),
    "TRL ChunkedLogProbFunction": ("trl", trl_chunked),
    "verl FusedLinearForPPO": ("verl", verl_torch),
    "verl linear_cross_entropy (triton)": ("verl", verl_triton),
}
"""Ways to score, each with the distribution that it is of."""


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def timed(call: Callable[[], Any], runs: int) -> tuple[float, float, float, Any]:
    """Median and least seconds, peak GiB in addition to the operands, and the result."""
    gpu = torch.cuda.is_available()
    sync = torch.cuda.synchronize if gpu else (lambda: None)
    for _ in range(3 if gpu else 1):
        result = call()
    sync()
    base = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(runs):
        begun = time.perf_counter()
        result = call()
        sync()
        seconds.append(time.perf_counter() - begun)
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30 if gpu else 0.0
    return sorted(seconds)[len(seconds) // 2], min(seconds), peak, result


def row(name: str, call: Callable[[], Any], expected: Any, options: argparse.Namespace) -> None:
    """Time one way and print its line; ``expected`` is the reference of the first tokens, ``None``
    where there is none.
    """
    try:
        with torch.no_grad():
            seconds, least, peak, result = timed(call, options.runs)
    except Exception as error:  # noqa: BLE001 - a peer that does not run here is reported, and the others still are
        first = str(error).strip().splitlines()
        print(
            f"{name:48} did not run: {type(error).__name__}: {first[0][:100] if first else ''}",
            flush=True,
        )
        return
    wrong = None if expected is None else (result[: len(expected)].double() - expected).abs()
    errors = "" if wrong is None else f"{wrong.mean():11.2e} {wrong.max():10.2e}"
    each = 1e6 / options.tokens
    print(f"{name:48} {seconds * each:9.3f} {least * each:9.3f} {peak:6.2f} {errors}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 256)
    parser.add_argument("--width", type=int, default=2048 if gpu else 256)
    parser.add_argument("--vocabulary", type=int, default=151_936 if gpu else 20_000)
    parser.add_argument(
        "--spread", type=float, default=2.0, help="standard deviation of the logits"
    )
    parser.add_argument("--runs", type=int, default=30 if gpu else 3)
    parser.add_argument("--only", nargs="*", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    device, kind = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, device=device).to(kind)
    head = (
        torch.randn(options.vocabulary, options.width, device=device)
        * (options.spread / options.width**0.5)
    ).to(kind)
    tokens = torch.randint(options.vocabulary, (options.tokens,), device=device)
    sample = slice(0, 128)
    exact = hidden[sample].double() @ head.double().t()
    log_distribution = torch.log_softmax(exact, -1)
    reference = log_distribution.gather(1, tokens[sample, None])[:, 0]
    where = torch.cuda.get_device_name() if gpu else "CPU"
    print(
        f"{where}, torch {torch.__version__}: {options.tokens} tokens, width {options.width},"
        f" vocabulary {options.vocabulary}, {kind}"
    )
    print(
        f"{'way':48} {'us/token':>9} {'least':>9} {'GiB':>6} {'mean error':>11} {'max error':>10}"
    )
    for name, (distribution, maker) in WAYS.items():
        if name not in options.only:
            continue
        own = distribution in ("torch", "rollproof")
        label = name if own else f"{name} {version_of(distribution)}"
        try:
            way = maker()
        except ImportError as error:
            print(f"{label:48} absent: {error}", flush=True)
            continue
        row(
            label,
            lambda way=way: way(hidden, head, tokens),
            None if maker is product else reference,
            options,
        )
    scores = score(hidden[sample], head, tokens[sample])
    entropy = -(log_distribution.exp() * log_distribution).sum(-1)
    print(f"entropy of ours: mean error {(scores.entropy.double() - entropy).abs().mean():.2e}")
    other = (hidden.float() * 1.01).to(kind)
    second = torch.log_softmax(other[sample].double() @ head.double().t(), -1)
    kl = (log_distribution.exp() * (log_distribution - second)).sum(-1)
    row("full-vocabulary KL of two heads", lambda: head_kl(hidden, head, other, head), kl, options)


if __name__ == "__main__":
    main()
