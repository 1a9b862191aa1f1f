"""The spy to which an adapter reports the router calls of a step, and sketches of gradients.

A spy is placed on the *output* of every router, never on what was installed. It is plain data: a
worker process has one of its own, and the adapter sends its ``events`` to the parent, which adds
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
    """A subject does not offer what a step requests (a variant, weights, switching replay off); the
    text says why.
    """


class Spy:
    """Records the router calls and the installed targets of one step on one rank.

    If the step plans a failure, ``routed`` raises ``InjectedFailure`` in the planned call.
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
        """Wrap a backward pass: router calls in it are recomputes."""
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
        """Report the choices of a router.

        Give the rows' ``tokens``, or their ``samples`` and ``positions``.

        Args:
            layer: Global index of the router's layer.
            experts: The chosen experts ``(rows, top_k)``; ``ids_of_map`` converts a routing map.
            tokens: The input token of each row. Tokens are unique within the step; an id that
                belongs to no sample means padding.
            samples: The sample of each row, as in ``Routing``.
            positions: The position of each row in its sample, as in ``Routing``.
            model: The role of the model.
            microbatch: The number of the microbatch; default: ``Spy.microbatch``.

        Raises:
            SubjectError: The arrays do not fit each other.
            InjectedFailure: The step plans a failure of this call.
        """
        # a copy: trainers reuse the buffers of their routers
        chosen = np.array(experts)
        count = self.microbatch if microbatch is None else microbatch
        if not is_whole(layer) or not is_whole(count) or not isinstance(model, str):
            raise SubjectError(
                "Spy.routed needs whole numbers for layer and microbatch and a name for model; it"
                f" got layer {layer!r}, microbatch {count!r}, model {model!r}."
            )
        if tokens is not None:
            samples, positions = identify(tokens, self.step.samples)
        if samples is None or positions is None:
            raise SubjectError("Spy.routed needs the rows' tokens, or their samples and positions.")
        row_samples, row_positions = np.array(samples), np.array(positions)
        rows = (len(chosen),) if chosen.ndim == 2 else None
        if not rows == row_samples.shape == row_positions.shape or not all(
            _is_int32(array) for array in (chosen, row_samples, row_positions)
        ):
            raise SubjectError(
                "Spy.routed needs integer experts (rows, top_k), and a sample and a position for"
                f" each row, in the range of int32; it got experts {chosen.dtype} {chosen.shape},"
                f" samples {row_samples.dtype} {row_samples.shape}, positions"
                f" {row_positions.dtype} {row_positions.shape}."
            )
        self.events.append(
            Routing(
                layer=int(layer),
                phase=self._phase,
                experts=chosen.astype(np.int32),
                samples=row_samples.astype(np.int32),
                positions=row_positions.astype(np.int32),
                microbatch=int(count),
                rank=self.rank,
                model=model,
            )
        )
        # after the event: a router that fails has been called
        self._fail()

    def installed(self, layer: int, *, microbatch: int | None = None) -> None:
        """Report that a target was given to the router of global index ``layer``."""
        self.events.append(
            Install(
                layer=layer,
                microbatch=self.microbatch if microbatch is None else microbatch,
                rank=self.rank,
            )
        )

    def extend(self, events: Iterable[Event]) -> None:
        """Add what the spy of another process recorded."""
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
    """Return whether a value is an integer, of Python or numpy, and no boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_int32(array: npt.NDArray[Any]) -> bool:
    """Return whether an int32 holds all values of an array; an empty array may be of any type."""
    if not array.size:
        return True
    bounds = np.iinfo(np.int32)
    return (
        array.dtype.kind in "iu"
        and bool(array.min() >= bounds.min)
        and bool(array.max() <= bounds.max)
    )


def identify(tokens: npt.ArrayLike, samples: Sequence[Rollout]) -> tuple[IntArray, IntArray]:
    """Return the sample and the position of each row by its input token ``(rows,)``.

    Both are -1 for a token that belongs to no sample.
    """
    places = {
        token: (i, position)
        for i, sample in enumerate(samples)
        for position, token in enumerate(sample.prompt_ids + sample.response_ids)
    }
    rows = [places.get(int(token), (-1, -1)) for token in np.asarray(tokens).ravel()]
    pairs = np.array(rows, dtype=np.int32).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def ids_of_map(routing_map: npt.ArrayLike, top_k: int) -> IntArray:
    """Convert a boolean routing map ``(rows, experts)`` to expert ids ``(rows, top_k)``, ascending.

    Rows with fewer experts are filled with -1. If a row has more than ``top_k`` experts, all rows
    become as wide as the widest.
    """
    chosen = np.asarray(routing_map) != 0
    counts = chosen.sum(axis=1)
    width = max(top_k, int(counts.max(initial=0)))
    # the column of an expert is its number among the experts of its row
    ids = np.full((len(chosen), width), -1, dtype=np.int32)
    rows, experts = np.nonzero(chosen)
    ids[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = experts
    return ids


@lru_cache(maxsize=64)
def _signs(size: int) -> FloatArray:
    """Return ``(8, size)`` of +1 and -1."""
    # seeded by the size: every rank must draw the same signs, without exchanging them
    return np.random.default_rng(size).integers(0, 2, (_PROBES, size)).astype(np.float64) * 2 - 1


def direction(shape: tuple[int, ...]) -> FloatArray:
    """Return the array of +1 and -1 along which gate weights of ``shape`` are nudged. It depends on
    the shape only.
    """
    return np.array(_signs(int(np.prod(shape, dtype=np.int64)))[0]).reshape(shape)


def sketch(gradient: Any) -> FloatArray:
    """Return ``(9,)``: the norm of a gradient and its products with eight fixed sign vectors, of
    which the first is ``direction``.

    The mean squared difference of the products of two arrays of one shape estimates the squared
    norm of their difference (Johnson and Lindenstrauss 1984, with the signs of Achlioptas 2003).
    Takes an array or a CPU tensor.
    """
    if hasattr(gradient, "detach"):
        gradient = gradient.detach().cpu().double().numpy()
    # in float32, the sum over a large weight would depend on the order of its terms
    flat: FloatArray = np.asarray(gradient, dtype=np.float64).ravel()
    return np.concatenate([[np.sqrt(flat @ flat)], _signs(flat.size) @ flat])
