"""A model of HF transformers on several processes as a scorer of the gap.

Parameters are sharded by FSDP2, or sequences are sliced by Ulysses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollproof.core.records import IntArray, LogprobArray
from rollproof.errors import UsageError
from rollproof.gpu_suites.gap.engine_rollouts import Unit
from rollproof.gpu_suites.gap.scorers import HfScorer, Routes, Scored, logprobs_of
from rollproof.replay.process_group import Ranks

__all__ = ["Division", "RankedScorer", "scorer_ranks", "worker"]


class Division(StrEnum):
    """What is divided over the processes."""

    FSDP2 = "FSDP2"
    """Parameters; each process scores other samples."""
    ULYSSES = "Ulysses"
    """Each sequence into contiguous pieces, and attention by heads: DeepSpeed's
    ``UlyssesSPAttentionHF``.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trainer:
    division: Division
    checkpoints: tuple[tuple[str, Path], ...]
    dtype: str
    device: str
    batch: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Job:
    trainer: _Trainer
    units: tuple[Unit, ...]
    routes: Routes
    other: bool


def scorer_ranks(limit_s: float = 120.0, *, cuda: bool = False) -> Ranks:
    """Start processes for ranked scorers, with ``cuda`` on a GPU each. Close them when done."""
    return Ranks(
        worker,
        preload=("rollproof.replay.hf.ranked_trainer", "transformers.models.auto.modeling_auto"),
        limit_s=limit_s,
        cuda=cuda,
    )


class RankedScorer:
    """``HfScorer`` on ``world_size`` processes of ``ranks``.

    ``batch`` samples make a microbatch of a process.
    """

    def __init__(
        self,
        division: Division,
        checkpoints: Mapping[str, Path],
        dtype: str,
        ranks: Ranks,
        world_size: int,
        *,
        device: str = "cuda",
        batch: int = 16,
    ) -> None:
        self.name: str = f"hf {division}={world_size}"
        self.dtype: str = dtype
        self.records: bool = True
        self._trainer = _Trainer(
            division=division,
            checkpoints=tuple(checkpoints.items()),
            dtype=dtype,
            device=device,
            batch=batch,
        )
        self._ranks, self._size = ranks, world_size

    def score(self, units: Sequence[Unit], routes: Routes, *, other: bool = False) -> Scored:
        """See ``Scorer``. Raises ``RankError`` if a rank fails; the other ranks are ended."""
        logprobs: list[LogprobArray | None] = [None] * len(units)
        executed: list[IntArray | None] = [None] * len(units)
        job = _Job(trainer=self._trainer, units=tuple(units), routes=routes, other=other)
        # a crew for each trainer, because DeepSpeed is set up once in a process
        results = self._ranks.run(job, world_size=self._size, crew=self._trainer)
        shares = _shares(self._trainer.division, units, self._size)
        for share, scored in zip(shares, results, strict=True):
            for number, own, used in zip(share, scored.logprobs, scored.routes, strict=True):
                logprobs[number], executed[number] = own, used
        return Scored(
            logprobs=tuple(own for own in logprobs if own is not None),
            routes=tuple(own for own in executed if own is not None),
        )

    def repeated(self, units: Sequence[Unit], native: Scored) -> Scored:
        """See ``Scorer``: padding is routed natively in both passes."""
        return self.score(units, native.routes)

    def close(self) -> None:
        """Do nothing: the owner of the ranks closes them."""


def _shares(division: Division, units: Sequence[Unit], size: int) -> Iterator[list[int]]:
    """Yield the units of each process."""
    # Sharded parameters are gathered in each forward, so each process must run as many forwards of
    # each version. If the units cannot be divided evenly, the last one is scored several times.
    if division is Division.ULYSSES:
        yield from [list(range(len(units)))] * size
        return
    shares: list[list[int]] = [[] for _ in range(size)]
    for version in dict.fromkeys(unit.version for unit in units):
        mine = sorted(
            (i for i, unit in enumerate(units) if unit.version == version),
            key=lambda i: len(units[i].ids),
        )
        mine += mine[-1:] * (-len(mine) % size)
        for rank, share in enumerate(shares):
            share += mine[rank::size]
    yield from shares


class _Sharded(HfScorer):
    def _wrapped(self, model: Any) -> Any:
        from rollproof.replay.hf.hf_setups import Setup
        from rollproof.replay.hf.ranked_trainer import WRAPS

        return WRAPS["fsdp2"](model, Setup(parallel="fsdp2", device=self._device))


class _Sliced(HfScorer):
    """Padding is on the right, where causal attention needs no mask: Ulysses' takes none."""

    _wraps: Any = None

    def _wrapped(self, model: Any) -> Any:
        from deepspeed import comm
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from torch import distributed

        heads = model.config.num_attention_heads
        # Ulysses exchanges sequence slices for head slices in attention
        if heads % (size := distributed.get_world_size()):
            raise UsageError(
                f"{heads} attention heads are not divided by {size} processes: Ulysses gives each"
                " some of them."
            )
        if self._wraps is None:
            # this replaces transformers' attention for all models of the process
            comm.init_distributed(dist_backend=distributed.get_backend(), dist_init_required=False)
            self._wraps = UlyssesSPAttentionHF.register_with_transformers(
                model,
                core_attn_implementation="sdpa",
                sequence_parallel_size=size,
                micro_batch_size=self._batch,
            )
        return model

    def _forward(self, model: Any, ids: Any, mask: Any, placed: Any) -> tuple[LogprobArray, Any]:
        import torch
        from torch import distributed
        from torch.nn.functional import pad

        from rollproof.replay.hf import hf_record, hf_replay

        size, rank = distributed.get_world_size(), distributed.get_rank()
        rows, width = ids.shape
        wide = -(-width // size)
        mine = slice(rank * wide, (rank + 1) * wide)

        def own(batch: Any, fill: int) -> Any:
            """Return this process's piece of the positions, padded to a full microbatch."""
            # the attention was set up for that number of samples
            padding = [0, 0] * (batch.ndim - 2) + [0, wide * size - width, 0, self._batch - rows]
            return pad(batch, padding, value=fill)[:, mine].contiguous().to(self._device)

        def together(piece: Any) -> Any:
            pieces = [torch.empty_like(piece) for _ in range(size)]
            distributed.all_gather(pieces, piece.contiguous())
            return torch.cat(pieces, 1)[:rows, :width]

        routing: Any = (
            hf_record(model) if placed is None else hf_replay(model, own(placed, -1).flatten(0, 1))
        )
        positions = torch.arange(wide * size, device=self._device)[mine].repeat(self._batch, 1)
        with torch.no_grad(), routing:
            logits = model(own(ids, 0), position_ids=positions, use_cache=False).logits
        logprobs = (
            together(logprobs_of(logits, own(pad(ids[:, 1:], [0, 1]), 0)))[:, :-1].cpu().numpy()
        )
        if placed is not None:
            return logprobs, None
        return (
            logprobs,
            together(routing.routes.to(self._device).unflatten(0, (self._batch, wide)))
            .cpu()
            .numpy(),
        )


_SCORERS = {Division.FSDP2: _Sharded, Division.ULYSSES: _Sliced}


def worker(rank: int, world_size: int) -> Callable[[_Job], Scored]:
    """Return the task of ``rollproof.replay.process_group.Ranks``."""

    @functools.cache
    def scorer(trainer: _Trainer) -> HfScorer:
        return _SCORERS[trainer.division](
            dict(trainer.checkpoints), trainer.dtype, device=trainer.device, batch=trainer.batch
        )

    def work(job: _Job) -> Scored:
        trainer = job.trainer
        mine = list(_shares(trainer.division, job.units, world_size))[rank]
        routes = None if job.routes is None else [job.routes[number] for number in mine]
        return scorer(trainer).score(
            [job.units[number] for number in mine], routes, other=job.other
        )

    return work
