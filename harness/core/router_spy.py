"""Spy: what an adapter tells of a step while it runs, and the sketches in which it tells gradients.

A spy is placed on the *output* of every router, never on what was installed. It is plain data: a
worker process has one of its own, and the adapter hands its ``events`` to the parent, which adds
them with ``extend``, rank after rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Install, Phase, Routing, Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.errors import RollproofError, SubjectError

__all__ = [
    "InjectedFailure",
    "Spy",
    "UnsupportedStep",
    "direction",
    "identify",
    "ids_of_map",
    "is_whole",
    "sketch",
]

_PROBES = 8


class InjectedFailure(RuntimeError):
    """The harness raised this within a router call, as any failure in the middle of a step would be
    raised.
    """


class UnsupportedStep(RollproofError, NotImplementedError):
    """A subject does not offer what a step asks for (a variant, weights, a way to switch replay
    off); the text says why.
    """


class Spy:
    """Takes the router calls and the installs of one step on one rank. Raises ``InjectedFailure``
    where the step says so.
    """

    def __init__(self, step: Step, rank: int = 0) -> None:
        self.step: Step = step
        self.rank: int = rank
        self.events: list[Event] = []
        self.microbatch: int = 0
        self._phase = Phase.FORWARD
        self._calls = {Phase.FORWARD: 0, Phase.RECOMPUTE: 0}

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around a backward pass: router calls in it are recomputes."""
        before, self._phase = self._phase, Phase.RECOMPUTE
        try:
            yield
        finally:
            self._phase = before

    def routed(
        self,
        layer: int,
        experts: npt.ArrayLike,
        *,
        tokens: npt.ArrayLike | None = None,
        samples: npt.ArrayLike | None = None,
        positions: npt.ArrayLike | None = None,
        model: str = "policy",
        microbatch: int | None = None,
    ) -> None:
        """The router of global index ``layer`` has chosen ``experts`` ``(rows, top_k)``
        (``ids_of_map`` makes them of a routing map).

        Which row is which is told by ``samples`` and ``positions``, as in ``Routing``, or by the
        rows' input ``tokens``, which are unique over the step (any id that is no sample's is
        padding). Raises ``SubjectError`` for arrays that do not fit each other.
        """
        chosen = np.array(experts)
        count = self.microbatch if microbatch is None else microbatch
        if not is_whole(layer) or not is_whole(count) or not isinstance(model, str):
            raise SubjectError(
                "Spy.routed needs whole numbers for layer and microbatch and a name for model; it"
                f" was given layer {layer!r}, microbatch {count!r}, model {model!r}."
            )
        if tokens is not None:
            samples, positions = identify(tokens, self.step.samples)
        if samples is None or positions is None:
            raise SubjectError("Spy.routed needs the rows' tokens, or their samples and positions.")
        who, where = np.array(samples), np.array(positions)
        fit = chosen.ndim == 2 and who.shape == (len(chosen),) == where.shape
        if not fit or not all(_is_int32(array) for array in (chosen, who, where)):
            raise SubjectError(
                "Spy.routed needs integer experts (rows, top_k), and a sample and a position for"
                f" each row, in the range of int32; it was given experts {chosen.dtype}"
                f" {chosen.shape}, samples {who.dtype} {who.shape}, positions {where.dtype}"
                f" {where.shape}."
            )
        self.events.append(
            Routing(
                layer=int(layer),
                phase=self._phase,
                experts=chosen.astype(np.int32),
                samples=who.astype(np.int32),
                positions=where.astype(np.int32),
                microbatch=int(count),
                rank=self.rank,
                model=model,
            )
        )
        self._fail()

    def installed(self, layer: int, *, microbatch: int | None = None) -> None:
        """A target was given to the router of global index ``layer``."""
        self.events.append(
            Install(
                layer=layer,
                microbatch=self.microbatch if microbatch is None else microbatch,
                rank=self.rank,
            )
        )

    def extend(self, events: Iterable[Event]) -> None:
        """Add what the spy of another process took."""
        self.events.extend(events)

    def _fail(self) -> None:
        number = self._calls[self._phase]
        self._calls[self._phase] = number + 1
        if self._phase is self.step.fail_in and number == self.step.fail_at:
            raise InjectedFailure(
                f"rollproof raised this in router call {number} of the {self._phase} pass of step"
                f" {self.step.name!r}."
            )


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, of Python or numpy, and no boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_int32(array: npt.NDArray[Any]) -> bool:
    """Whether an array holds whole numbers that an int32 holds; an empty one may be of any type."""
    if not array.size:
        return True
    bounds = np.iinfo(np.int32)
    return (
        array.dtype.kind in "iu"
        and bool(array.min() >= bounds.min)
        and bool(array.max() <= bounds.max)
    )


def identify(tokens: npt.ArrayLike, samples: Sequence[Rollout]) -> tuple[IntArray, IntArray]:
    """The sample and the position of each row by its input token ``(rows,)``; -1 and -1 for a token
    of no sample.
    """
    places = {
        token: (i, p)
        for i, one in enumerate(samples)
        for p, token in enumerate(one.prompt_ids + one.response_ids)
    }
    found = [places.get(int(token), (-1, -1)) for token in np.asarray(tokens).ravel()]
    pairs = np.array(found, dtype=np.int32).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def ids_of_map(routing_map: npt.ArrayLike, top_k: int) -> IntArray:
    """Expert ids ``(rows, top_k)``, ascending, of a routing map ``(rows, experts)`` of booleans; -1
    where a row has fewer.

    A row with more than ``top_k`` experts makes all rows as wide as it is.
    """
    chosen = np.asarray(routing_map) != 0
    counts = chosen.sum(axis=1)
    width = max(top_k, int(counts.max(initial=0)))
    ids = np.full((len(chosen), width), -1, dtype=np.int32)
    rows, experts = np.nonzero(chosen)
    ids[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = experts
    return ids


@lru_cache(maxsize=64)
def _signs(size: int) -> FloatArray:
    """``(8, size)`` of +1 and -1."""
    return np.random.default_rng(size).integers(0, 2, (_PROBES, size)).astype(np.float64) * 2 - 1


def direction(shape: tuple[int, ...]) -> FloatArray:
    """The direction of +1 and -1 along which gate weights of ``shape`` are nudged; always the same
    one.
    """
    return np.array(_signs(int(np.prod(shape, dtype=np.int64)))[0]).reshape(shape)


def sketch(gradient: Any) -> FloatArray:
    """``(9,)``: the norm of a gradient and its products with eight fixed sign vectors, the first of
    which is ``direction``.

    Sketches of equal arrays are equal bit for bit; the mean squared difference of the products of
    two arrays of one shape estimates the squared norm of their difference (Johnson and
    Lindenstrauss 1984, with the signs of Achlioptas 2003). Takes an array or a CPU tensor.
    """
    if hasattr(gradient, "detach"):
        gradient = gradient.detach().cpu().double().numpy()
    flat: FloatArray = np.asarray(gradient, dtype=np.float64).ravel()
    return np.concatenate([[np.sqrt(flat @ flat)], _signs(flat.size) @ flat])
