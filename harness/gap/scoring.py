"""Scoring: logprobs and entropies out of hidden states and a head, without ever holding the logits
of all tokens.

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

_TOKENS, _VOCAB = 4096, 4096
"""Block on a GPU without the kernels: 64 MiB of float32 logits."""
_CPU_TOKENS, _CPU_VOCAB = 256, 8192


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """``logprob`` and ``entropy``: ``(tokens,)`` float32, in nats, of the law softmax(logits /
    temperature).
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
    rank's shard, whose first row is token ``first``; every rank gets the same result. Raises
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
    """``(n,)`` float32: KL(p || q) in nats, over the whole vocabulary, of the laws of two heads on
    the same tokens.

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
        least, most = torch.stack(torch.aminmax(tokens)).tolist()  # one wait for a GPU, not two
        if least < first or most >= first + head.shape[0]:
            raise GapError(
                f"tokens hold ids from {least} to {most}, outside of a head of {head.shape[0]}"
                " entries."
            )


def _blocks(hidden: Any, head: Any, scale: float) -> Iterator[tuple[slice, slice, Any]]:
    """Logits in float32, already divided by the temperature, of blocks of tokens and vocabulary."""
    import torch

    on_gpu = hidden.is_cuda
    high, wide = (_TOKENS, _VOCAB) if on_gpu else (_CPU_TOKENS, _CPU_VOCAB)
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    for begin in range(0, hidden.shape[0], high):
        rows = slice(begin, min(begin + high, hidden.shape[0]))
        states = hidden[rows] if on_gpu and half else hidden[rows].float()
        for left in range(0, head.shape[0], wide):
            columns = slice(left, min(left + wide, head.shape[0]))
            weights = head[columns]
            fits = on_gpu and half
            logits = (
                torch.mm(states, weights.t(), out_dtype=torch.float32)
                if fits
                else states @ weights.float().t()
            )
            yield rows, columns, logits if scale == 1.0 else logits.mul_(scale)


def _fold(state: Any, logits: Any, own: Any) -> None:
    """Take a block into ``state`` ``(4, rows)``: maximum, sum of exp, sum of logit x exp, the logit
    of the row's own token.
    """
    import torch

    top = torch.maximum(state[0], logits.max(dim=1).values)
    chances = (logits - top[:, None]).exp_()
    keep = (state[0] - top).exp_()
    state[1].mul_(keep).add_(chances.sum(dim=1))
    state[2].mul_(keep).add_(torch.nan_to_num_(chances.mul_(logits), nan=0.0).sum(dim=1))
    state[0].copy_(top)
    here = (own >= 0) & (own < logits.shape[1])
    picked = logits.gather(1, own.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    state[3].copy_(torch.where(here, picked, state[3]))


def _fold_pair(state: Any, p: Any, q: Any) -> None:
    """As ``_fold`` for two laws: maximum and sum of exp of either, and the sum of exp(p) x (p - q)."""
    import torch

    top, other = (
        torch.maximum(state[0], p.max(dim=1).values),
        torch.maximum(state[2], q.max(dim=1).values),
    )
    chances = (p - top[:, None]).exp_()
    keep = (state[0] - top).exp_()
    state[1].mul_(keep).add_(chances.sum(dim=1))
    state[4].mul_(keep).add_((chances * (p - q)).sum(dim=1))
    state[3].mul_((state[2] - other).exp_()).add_((q - other[:, None]).exp_().sum(dim=1))
    state[0].copy_(top)
    state[2].copy_(other)


def _merged(state: Any, group: Any) -> Any:
    """The state over all shards of the vocabulary; a token's own logit is on one rank only."""
    import torch
    import torch.distributed as dist

    top = state[0].clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    keep = (state[0] - top).exp()
    sums = torch.stack([state[1] * keep, state[2] * keep, state[3]])
    dist.all_reduce(sums, group=group)
    return torch.stack([top, *sums])


def _kernels(*operands: Any) -> Any:
    """The fused kernels, where these operands are such that they take them; ``None``: blocks by
    torch's own operations.
    """
    if not operands[0].is_cuda or not len(operands[0]):
        return None
    try:
        from rollproof.gap import scoring_kernels
    except ImportError:  # no triton, or one without tensor descriptors
        return None
    return scoring_kernels if scoring_kernels.fits(*operands) else None
