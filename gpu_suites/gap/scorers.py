"""Scorers: trainers that score finished samples, natively routed or with given routes; here models
of HF transformers on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from rollproof.core.records import FinishReason, IntArray, LogprobArray, Rollout
from rollproof.errors import EngineError, GapError, UsageError
from rollproof.gpu_suites.gap.engine_rollouts import Unit

__all__ = [
    "GivenScorer",
    "HfScorer",
    "Routes",
    "Scored",
    "Scorer",
    "empty_cuda",
    "logprobs_of",
    "rollout_of",
]

Routes: TypeAlias = "Sequence[IntArray] | None"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """What a trainer made of units, in their order.

    ``logprobs`` are ``(end - start,)`` each, ``routes`` ``(tokens - 1, layers with a router,
    top_k)``: what its routers executed.
    """

    logprobs: tuple[LogprobArray, ...]
    routes: tuple[IntArray, ...]


class Scorer(Protocol):
    """A trainer. ``routes`` hold ``(tokens - 1, layers, top_k)`` for each unit to be replayed;
    ``None``: routers choose by themselves.

    ``other`` asks for another division into microbatches, as the update of a policy has another one
    than its old-logprob pass. ``records`` says that ``Scored.routes`` are those of every token, so
    that they can be replayed; ``repeated`` is then what the units score where every row, padding
    too, executes what it did when they scored ``native``: the same to the last bit.
    """

    name: str
    dtype: str
    records: bool

    def score(self, units: Sequence[Unit], routes: Routes, *, other: bool = False) -> Scored: ...
    def repeated(self, units: Sequence[Unit], native: Scored) -> Scored: ...
    def close(self) -> None: ...


class GivenScorer:
    """A trainer of the user's own: what ``spec`` (``module:factory``) makes of ``checkpoints``
    (folders by version).

    It is a ``rollproof.gap.scored_rollouts.GapTrainer``, and tells at most the routes of response tokens:
    nothing of it can be replayed, so R2 and self-replay are not measured. Raises ``UsageError`` for
    a spec that names nothing, or something else.
    """

    def __init__(self, spec: str, checkpoints: Mapping[str, Path], dtype: str) -> None:
        from rollproof.cli.named_targets import named_factory
        from rollproof.gap.scored_rollouts import GapTrainer

        self.name: str = spec
        self.dtype: str = dtype
        self.records: bool = False
        trainer = named_factory(spec, "--rollproof-trainer")(dict(checkpoints))
        if not isinstance(trainer, GapTrainer):
            raise UsageError(
                f"--rollproof-trainer {spec} makes a {type(trainer).__name__}, which has no"
                " score(rollouts, *, version, replay): see docs/gap.md."
            )
        self._trainer = trainer

    def score(self, units: Sequence[Unit], routes: Routes, *, other: bool = False) -> Scored:
        """See ``Scorer``. Rows of which the trainer tells no routes are -1. Raises what the trainer
        raises, and ``GapError``.
        """
        from rollproof.gap.scored_rollouts import Scored as Told

        logprobs: dict[int, LogprobArray] = {}
        executed: dict[int, IntArray] = {}
        for version in dict.fromkeys(unit.version for unit in units):
            mine = [number for number, unit in enumerate(units) if unit.version == version]
            rollouts = [
                rollout_of(number, units[number], None if routes is None else routes[number])
                for number in mine
            ]
            told = self._trainer.score(rollouts, version=version, replay=routes is not None)
            if len(told) != len(mine):
                raise GapError(
                    f"The trainer returned {len(told)} scores for {len(mine)} rollouts under"
                    f" version {version}."
                )
            for number, one in zip(mine, told, strict=True):
                unit, scored = units[number], one if isinstance(one, Told) else Told(logprobs=one)
                logprobs[number] = np.asarray(scored.logprobs, dtype=np.float64)
                if logprobs[number].shape != (unit.end - unit.start,):
                    raise GapError(
                        f"The trainer's logprobs have the shape {logprobs[number].shape} for"
                        f" {unit.end - unit.start} tokens."
                    )
                executed[number] = np.full(unit.routes.shape, -1, dtype=np.int64)
                if scored.routes is not None:
                    executed[number][unit.start - 1 : unit.end - 1] = np.asarray(scored.routes)
        return Scored(
            logprobs=tuple(logprobs[number] for number in range(len(units))),
            routes=tuple(executed[number] for number in range(len(units))),
        )

    def repeated(self, units: Sequence[Unit], native: Scored) -> Scored:
        """See ``Scorer``: it records nothing."""
        raise GapError(f"The trainer {self.name} records no routes that could be replayed.")

    def close(self) -> None:
        """Let the trainer go, and the device's memory that it held."""
        import gc

        del self._trainer
        gc.collect()
        empty_cuda()


def rollout_of(number: int, unit: Unit, routes: IntArray | None) -> Rollout:
    """A unit as a rollout that a trainer scores: what stands before its stretch is the prompt."""
    return Rollout(
        request_id=str(number),
        prompt_ids=unit.ids[: unit.start],
        response_ids=unit.ids[unit.start : unit.end],
        finish_reason=FinishReason.LENGTH,
        routes=None if routes is None else np.ascontiguousarray(routes).astype(np.int32),
    )


def logprobs_of(logits: Any, ids: Any) -> Any:
    """Logprobs ``(batch, width)`` float64 of ``ids`` by ``logits`` ``(batch, width, vocabulary)``."""
    return logits.float().log_softmax(-1).gather(2, ids[..., None])[..., 0].double()


def empty_cuda() -> None:
    """Give back what torch's allocator keeps, where torch has been used at all."""
    import sys

    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class HfScorer:
    """A model of HF transformers for each of ``checkpoints`` (folders by version), on ``device``;
    no gradient is taken.

    ``batch`` samples of similar length make a microbatch, padded on the right.
    """

    def __init__(
        self,
        checkpoints: Mapping[str, Path],
        dtype: str = "bfloat16",
        *,
        device: str = "cuda",
        batch: int = 16,
    ) -> None:
        self.name: str = "hf"
        self.dtype: str = dtype
        self.records: bool = True
        self._checkpoints, self._device, self._batch = dict(checkpoints), device, batch
        self._models: dict[str, Any] = {}

    def score(self, units: Sequence[Unit], routes: Routes, *, other: bool = False) -> Scored:
        """See ``Scorer``. Raises ``EngineError`` where transformers cannot load a checkpoint, and
        what ``hf_replay`` raises.
        """
        logprobs: list[LogprobArray | None] = [None] * len(units)
        executed: list[IntArray | None] = [None] * len(units)
        size = max(1, self._batch // 4) if other else self._batch
        for version in dict.fromkeys(unit.version for unit in units):
            mine = sorted(
                (i for i, unit in enumerate(units) if unit.version == version),
                key=lambda i: len(units[i].ids),
            )
            for begin in range(0, len(mine), size):
                numbers = mine[begin : begin + size]
                found = self._pass(
                    version,
                    [units[i] for i in numbers],
                    None if routes is None else [routes[i] for i in numbers],
                )
                for place, number in enumerate(numbers):
                    logprobs[number], executed[number] = found[place]
        return Scored(
            logprobs=tuple(one for one in logprobs if one is not None),
            routes=tuple(one for one in executed if one is not None),
        )

    def repeated(self, units: Sequence[Unit], native: Scored) -> Scored:
        """See ``Scorer``: padding is routed natively in both passes."""
        return self.score(units, native.routes)

    def close(self) -> None:
        """Give the device's memory back."""
        self._models.clear()
        empty_cuda()

    def _pass(
        self, version: str, units: Sequence[Unit], routes: Routes
    ) -> list[tuple[LogprobArray, IntArray]]:
        import torch

        from rollproof.replay.hf import batch_routes

        width = max(len(unit.ids) for unit in units)
        ids = torch.zeros((len(units), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, unit in enumerate(units):
            ids[row, : len(unit.ids)] = torch.tensor(unit.ids)
            mask[row, : len(unit.ids)] = 1
        placed = None if routes is None else torch.from_numpy(batch_routes(routes, mask))
        own, recorded = self._forward(self._model(version), ids, mask, placed)
        used: Sequence[IntArray] = routes or recorded
        return [
            (own[row, unit.start - 1 : unit.end - 1], np.array(used[row][: len(unit.ids) - 1]))
            for row, unit in enumerate(units)
        ]

    def _forward(self, model: Any, ids: Any, mask: Any, placed: Any) -> tuple[LogprobArray, Any]:
        """Logprobs ``(batch, width - 1)`` of the next token, and recorded routes ``(batch, width,
        layers, top_k)`` if none are given.
        """
        import torch

        from rollproof.replay.hf import hf_record, hf_replay

        entered: Any = (
            hf_record(model) if placed is None else hf_replay(model, placed.to(self._device))
        )
        with torch.no_grad(), entered:
            logits = model(
                ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False
            ).logits
        own = logprobs_of(logits[:, :-1], ids[:, 1:].to(self._device)).cpu().numpy()
        return own, None if placed is not None else entered.routes.unflatten(0, ids.shape).numpy()

    def _model(self, version: str) -> Any:
        if version not in self._models:
            import torch
            from transformers import AutoModelForCausalLM

            path = self._checkpoints[version]
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    path, dtype=getattr(torch, self.dtype), local_files_only=True
                )
            except (OSError, ValueError, KeyError) as error:
                raise EngineError(f"transformers cannot load {path}: {error}.") from error
            self._models[version] = self._wrapped(model.to(self._device).eval())
        return self._models[version]

    def _wrapped(self, model: Any) -> Any:
        return model
