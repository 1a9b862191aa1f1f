"""Scorers: trainers that score samples, with native routing or with given routes.

Here are models of HF transformers on one device, and the user's own trainers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from rollproof.core.records import FinishReason, IntArray, LogprobArray, Rollout
from rollproof.errors import EngineError, GapError, UsageError
from rollproof.gpu_suites.gap.engine_rollouts import Unit

__all__ = [
    "HfScorer",
    "Routes",
    "Scored",
    "Scorer",
    "UserScorer",
    "empty_cuda",
    "logprobs_of",
    "rollout_of",
]

Routes: TypeAlias = "Sequence[IntArray] | None"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """A trainer's scores of units, in their order.

    Attributes:
        logprobs: ``(end - start,)`` each.
        routes: ``(tokens - 1, layers with a router, top_k)`` each: what its routers executed.
    """

    logprobs: tuple[LogprobArray, ...]
    routes: tuple[IntArray, ...]


class Scorer(Protocol):
    """A trainer.

    Attributes:
        name: its name.
        dtype: its dtype.
        records: whether ``Scored.routes`` are those of every token, so that they can be replayed.
    """

    name: str
    dtype: str
    records: bool

    def score(self, units: Sequence[Unit], routes: Routes, *, other: bool = False) -> Scored:
        """Score units, replaying ``routes`` ``(tokens - 1, layers, top_k)`` of each if given.

        ``other`` selects another division into microbatches, as the update of a policy has another
        one than its old-logprob pass.
        """
        ...

    def repeated(self, units: Sequence[Unit], native: Scored) -> Scored:
        """Score units with every row, padding too, executing what it did in ``native``.

        The result must be the same to the last bit.
        """
        ...

    def close(self) -> None:
        """Release what the trainer holds."""
        ...


class UserScorer:
    """The user's trainer, made by ``spec`` (``module:factory``) from ``checkpoints`` (by version).

    It is a ``rollproof.gap.scored_rollouts.GapTrainer``, which returns at most the routes of
    response tokens. They cannot be replayed, so R2 and self-replay are not measured. Raises
    ``UsageError`` for a spec that does not name a factory of a trainer.
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
        """See ``Scorer``. Rows without routes are -1.

        Raises what the trainer raises, and ``GapError``.
        """
        from rollproof.gap.scored_rollouts import Scored as TrainerScores

        logprobs: dict[int, LogprobArray] = {}
        executed: dict[int, IntArray] = {}
        for version in dict.fromkeys(unit.version for unit in units):
            mine = [number for number, unit in enumerate(units) if unit.version == version]
            rollouts = [
                rollout_of(number, units[number], None if routes is None else routes[number])
                for number in mine
            ]
            results = self._trainer.score(rollouts, version=version, replay=routes is not None)
            if len(results) != len(mine):
                raise GapError(
                    f"The trainer returned {len(results)} scores for {len(mine)} rollouts under"
                    f" version {version}."
                )
            for number, result in zip(mine, results, strict=True):
                unit, scored = units[number], cast("Any", result)
                if not isinstance(scored, TrainerScores):  # logprobs alone are accepted too
                    scored = TrainerScores(logprobs=scored)
                logprobs[number] = np.asarray(scored.logprobs, dtype=np.float64)
                if logprobs[number].shape != (unit.end - unit.start,):
                    raise GapError(
                        f"The trainer's logprobs have the shape {logprobs[number].shape} for"
                        f" {unit.end - unit.start} tokens."
                    )
                # -1 marks rows that the trainer did not return
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
        """Delete the trainer, and release its memory on the device."""
        import gc

        del self._trainer
        gc.collect()
        empty_cuda()


def rollout_of(number: int, unit: Unit, routes: IntArray | None) -> Rollout:
    """Return a unit as a rollout that a trainer scores; its context is the prompt."""
    return Rollout(
        request_id=str(number),
        prompt_ids=unit.ids[: unit.start],
        response_ids=unit.ids[unit.start : unit.end],
        finish_reason=FinishReason.LENGTH,
        routes=None if routes is None else np.ascontiguousarray(routes).astype(np.int32),
    )


def logprobs_of(logits: Any, ids: Any) -> Any:
    """``(batch, width)`` float64: logprobs of ``ids`` by ``(batch, width, vocabulary)`` logits."""
    return logits.float().log_softmax(-1).gather(2, ids[..., None])[..., 0].double()


def empty_cuda() -> None:
    """Release the memory of torch's allocator, if torch was used on a GPU."""
    import sys

    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class HfScorer:
    """A model of HF transformers for each of ``checkpoints`` (folders by version), on ``device``.

    ``batch`` samples of similar length make a microbatch, padded on the right. No gradient is
    taken.
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
        """See ``Scorer``.

        Raises ``EngineError`` if transformers cannot load a checkpoint, and what ``hf_replay``
        raises.
        """
        logprobs: list[LogprobArray | None] = [None] * len(units)
        executed: list[IntArray | None] = [None] * len(units)
        # a smaller microbatch changes shapes, and so the order in which kernels sum
        size = max(1, self._batch // 4) if other else self._batch
        for version in dict.fromkeys(unit.version for unit in units):
            mine = sorted(
                (i for i, unit in enumerate(units) if unit.version == version),
                key=lambda i: len(units[i].ids),
            )
            for begin in range(0, len(mine), size):
                numbers = mine[begin : begin + size]
                results = self._pass(
                    version,
                    [units[i] for i in numbers],
                    None if routes is None else [routes[i] for i in numbers],
                )
                for place, number in enumerate(numbers):
                    logprobs[number], executed[number] = results[place]
        return Scored(
            logprobs=tuple(own for own in logprobs if own is not None),
            routes=tuple(own for own in executed if own is not None),
        )

    def repeated(self, units: Sequence[Unit], native: Scored) -> Scored:
        """See ``Scorer``: padding is routed natively in both passes."""
        return self.score(units, native.routes)

    def close(self) -> None:
        """Release the memory on the device."""
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
        """Return logprobs ``(batch, width - 1)`` of the next token, and the recorded routes.

        The routes are ``(batch, width, layers, top_k)``; ``None`` if ``placed`` was replayed.
        """
        import torch

        from rollproof.replay.hf import hf_record, hf_replay

        routing: Any = (
            hf_record(model) if placed is None else hf_replay(model, placed.to(self._device))
        )
        with torch.no_grad(), routing:
            logits = model(
                ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False
            ).logits
        own = logprobs_of(logits[:, :-1], ids[:, 1:].to(self._device)).cpu().numpy()
        return own, None if placed is not None else routing.routes.unflatten(0, ids.shape).numpy()

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
