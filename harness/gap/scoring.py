"""Logprobs and entropies from hidden states and a head, without the logits of all tokens.

Logits are made for a block of tokens and a block of the vocabulary at a time, in float32 whatever
the precision of the operands (bf16 logits alone cost up to 2e-4 of KL), and folded into running
sums (online softmax, Milakov & Gimelshein 2018). Half-precision operands on a Hopper GPU take the
kernels of ``scoring_kernels``. Needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rollproof.errors import GapError

if TYPE_CHECKING:
    import torch

__all__ = ["Scores", "head_kl", "score"]

# Block on a GPU without the kernels: 64 MiB of float32 logits
_TOKENS, _VOCAB = 4096, 4096
_CPU_TOKENS, _CPU_VOCAB = 256, 8192


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """Scores under the distribution softmax(logits / temperature).

    Attributes:
        logprob: ``(tokens,)`` float32, in nats.
        entropy: ``(tokens,)`` float32, in nats.
    """

    logprob: torch.Tensor
    entropy: torch.Tensor


def score(
    hidden: Any,
    head: Any,
    tokens: Any,
    *,
    temperature: float = 1.0,
    group: Any = None,
    first: int = 0,
) -> Scores:
    """Score ``tokens`` ``(n,)`` with ``hidden`` ``(n, width)`` and ``head`` ``(vocabulary,
    width)``, both of one floating dtype.

    Row i of ``hidden`` predicts ``tokens[i]``. With ``group`` (a process group) ``head`` is this
    rank's shard, with token ``first`` in its first row; every rank gets the same result. Raises
    ``GapError`` for shapes, dtypes, ids or temperatures that do not fit.
    """
    import torch

    _check(hidden, head, tokens, temperature, first, sharded=group is not None)
    local = tokens.to(torch.int64) - first
    kernels = _kernels(hidden, head)
    with torch.no_grad():
        if kernels is not None:
            state = kernels.states(hidden, head, local, 1.0 / temperature)
        else:
            state = torch.zeros((4, hidden.shape[0]), dtype=torch.float32, device=hidden.device)
            state[0] = -math.inf
            for rows, columns, logits in _blocks(hidden, head, 1.0 / temperature):
                _fold(state[:, rows], logits, local[rows] - columns.start)
    if group is not None:
        state = _merged(state, group)
    top, total, weighted, own = state
    norm = top + total.log()
    return Scores(logprob=own - norm, entropy=norm - weighted / total)


def head_kl(
    hidden: Any, head: Any, other_hidden: Any, other_head: Any, *, temperature: float = 1.0
) -> torch.Tensor:
    """``(n,)`` float32: KL(p || q) in nats of two heads' distributions on the same tokens.

    ``hidden`` ``(n, width)`` and ``head`` ``(vocabulary, width)`` give p, the others q; the widths
    may differ. Raises ``GapError``.
    """
    import torch

    for states, weights in ((hidden, head), (other_hidden, other_head)):
        _check(
            states,
            weights,
            torch.zeros(states.shape[:1], dtype=torch.int64, device=states.device),
            temperature,
            0,
            sharded=False,
        )
    if hidden.shape[0] != other_hidden.shape[0] or head.shape[0] != other_head.shape[0]:
        raise GapError(
            "The two sides must score the same tokens over the same vocabulary, not"
            f" {hidden.shape[0]} and {other_hidden.shape[0]} tokens over {head.shape[0]} and"
            f" {other_head.shape[0]} entries."
        )
    kernels = _kernels(hidden, head, other_hidden, other_head)
    with torch.no_grad():
        if kernels is not None:
            return cast(
                "torch.Tensor",
                kernels.head_kl(hidden, head, other_hidden, other_head, 1.0 / temperature),
            )
        state = torch.zeros((5, hidden.shape[0]), dtype=torch.float32, device=hidden.device)
        state[0] = state[2] = -math.inf
        pairs = zip(
            _blocks(hidden, head, 1.0 / temperature),
            _blocks(other_hidden, other_head, 1.0 / temperature),
            strict=True,
        )
        for (rows, _, p), (_, _, q) in pairs:
            _fold_pair(state[:, rows], p, q)
    top, total, other_top, other_total, apart = state
    return apart / total - (top + total.log()) + (other_top + other_total.log())


def _check(
    hidden: Any, head: Any, tokens: Any, temperature: float, first: int, *, sharded: bool
) -> None:
    import torch

    if hidden.ndim != 2 or head.ndim != 2 or tokens.ndim != 1:
        raise GapError(
            "hidden, head and tokens must be (tokens, width), (vocabulary, width) and (tokens,),"
            f" not {tuple(hidden.shape)}, {tuple(head.shape)} and {tuple(tokens.shape)}: flatten"
            " the batch first."
        )
    if hidden.shape[1] != head.shape[1] or hidden.shape[0] != tokens.shape[0]:
        raise GapError(
            f"hidden {tuple(hidden.shape)}, head {tuple(head.shape)} and tokens"
            f" {tuple(tokens.shape)} do not fit each other."
        )
    if hidden.dtype != head.dtype or not hidden.is_floating_point():
        raise GapError(
            f"hidden is {hidden.dtype} and head {head.dtype}: cast one, and say so where the result"
            " is reported."
        )
    if hidden.device != head.device or hidden.device != tokens.device:
        raise GapError(
            f"hidden, head and tokens are on {hidden.device}, {head.device} and {tokens.device}:"
            " move them to one device."
        )
    if not (
        isinstance(temperature, int | float) and math.isfinite(temperature) and temperature > 0
    ):
        raise GapError(
            f"temperature must be a positive number, not {temperature!r}; a greedy sampler has no"
            " logprobs to compare."
        )
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise GapError(f"tokens must be integer ids, not {tokens.dtype}.")
    if not sharded and len(tokens):
        low, high = torch.stack(torch.aminmax(tokens)).tolist()  # one wait for a GPU, not two
        if low < first or high >= first + head.shape[0]:
            raise GapError(
                f"tokens hold ids from {low} to {high}, outside of a head of {head.shape[0]}"
                " entries."
            )


def _blocks(hidden: Any, head: Any, scale: float) -> Iterator[tuple[slice, slice, Any]]:
    """Yield logits of blocks of tokens and vocabulary, in float32, divided by the temperature."""
    import torch

    on_gpu = hidden.is_cuda
    block_tokens, block_vocab = (_TOKENS, _VOCAB) if on_gpu else (_CPU_TOKENS, _CPU_VOCAB)
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    for begin in range(0, hidden.shape[0], block_tokens):
        rows = slice(begin, min(begin + block_tokens, hidden.shape[0]))
        states = hidden[rows] if on_gpu and half else hidden[rows].float()
        for left in range(0, head.shape[0], block_vocab):
            columns = slice(left, min(left + block_vocab, head.shape[0]))
            weights = head[columns]
            # float32 results of half-precision operands exist on GPUs alone
            if on_gpu and half:
                logits = torch.mm(states, weights.t(), out_dtype=torch.float32)
            else:
                logits = states @ weights.float().t()
            yield rows, columns, logits if scale == 1.0 else logits.mul_(scale)


def _fold(state: Any, logits: Any, own: Any) -> None:
    """Add a block to ``state`` ``(4, rows)``.

    The rows of the state are the maximum, the sum of exp, the sum of logit x exp, and the logit of
    each token itself.
    """
    import torch

    top = torch.maximum(state[0], logits.max(dim=1).values)
    chances = (logits - top[:, None]).exp_()
    rescale = (state[0] - top).exp_()
    state[1].mul_(rescale).add_(chances.sum(dim=1))
    state[2].mul_(rescale).add_(torch.nan_to_num_(chances.mul_(logits), nan=0.0).sum(dim=1))
    state[0].copy_(top)
    # a token outside of this block or shard has its logit elsewhere
    here = (own >= 0) & (own < logits.shape[1])
    picked = logits.gather(1, own.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    state[3].copy_(torch.where(here, picked, state[3]))


def _fold_pair(state: Any, p: Any, q: Any) -> None:
    """Add a block of two heads: maximum and sum of exp of each, and sum of exp(p) x (p - q)."""
    import torch

    top, other = (
        torch.maximum(state[0], p.max(dim=1).values),
        torch.maximum(state[2], q.max(dim=1).values),
    )
    chances = (p - top[:, None]).exp_()
    rescale = (state[0] - top).exp_()
    state[1].mul_(rescale).add_(chances.sum(dim=1))
    state[4].mul_(rescale).add_((chances * (p - q)).sum(dim=1))
    state[3].mul_((state[2] - other).exp_()).add_((q - other[:, None]).exp_().sum(dim=1))
    state[0].copy_(top)
    state[2].copy_(other)


def _merged(state: Any, group: Any) -> Any:
    """Return the state over all shards of the vocabulary."""
    import torch
    import torch.distributed as dist

    top = state[0].clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    rescale = (state[0] - top).exp()
    # a token's own logit is on one rank, and 0 on the others
    sums = torch.stack([state[1] * rescale, state[2] * rescale, state[3]])
    dist.all_reduce(sums, group=group)
    return torch.stack([top, *sums])


def _kernels(*operands: Any) -> Any:
    """Return the fused kernels if they take these operands, else ``None`` (torch, in blocks)."""
    if not operands[0].is_cuda or not len(operands[0]):
        return None
    try:
        from rollproof.gap import scoring_kernels
    except ImportError:  # no triton, or one without tensor descriptors
        return None
    return scoring_kernels if scoring_kernels.fits(*operands) else None
