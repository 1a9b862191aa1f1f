"""The part of a contract that a trainer with routing replay declares about the replay.

The payload (rows, layer axis, layers, experts, top-k, dtype, filler) is declared by the
``Contract`` that holds the terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from rollproof.errors import ContractError

__all__ = ["Defect", "FreeRows", "Installs", "Recompute", "ReplayMode", "ReplayTerms"]


class ReplayMode(StrEnum):
    """The pass that recorded the routes which a training step replays."""

    R2 = "R2"
    """The trainer's own old-logprob pass."""
    R3 = "R3"
    """The rollout engine; the old-logprob pass replays them, too."""


class FreeRows(StrEnum):
    """What the routers do with a row that has no target: the final token, a row that was not
    captured, padding.
    """

    NATIVE = "native"
    """They choose by their own scores."""
    DUMMY = "dummy"
    """They execute a filler of top_k distinct experts."""


class Recompute(StrEnum):
    """What is computed again in the backward pass (activation checkpointing)."""

    NONE = "none"
    SELECTIVE = "selective"
    """Parts of a layer, with its router or without it."""
    FULL = "full"
    """Complete layers: every router is called a second time."""


class Installs(StrEnum):
    """How often a target is given to a router."""

    PER_CALL = "per-call"
    """Once for each forward call of a router: per microbatch and layer."""
    PER_STEP = "per-step"
    """Once per router and step, for all microbatches."""


class Defect(StrEnum):
    """A fault in the routes that a trainer gets."""

    SHORT = "short"
    """Fewer rows than forwarded tokens."""
    LONG = "long"
    """More rows than tokens."""
    NARROW = "narrow"
    """Fewer columns than top_k."""
    WIDE = "wide"
    """More columns than top_k."""
    FEW_LAYERS = "few-layers"
    """One layer less than the layer axis has."""
    FLOAT = "float"
    """Floating-point numbers in place of integers."""
    NEGATIVE = "negative"
    """A negative expert id, although the contract's filler is not ``minus-one``."""
    TOO_LARGE = "too-large"
    """An expert id of ``num_experts`` or more."""
    ZERO_ROWS = "zero-rows"
    """Rows of zeros: expert 0, top_k times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayTerms:
    """How a trainer replays.

    Incomplete or invalid terms raise ``ContractError``, which lists every problem.

    Attributes:
        vocab: The number of token ids that its model knows.
        recompute: The kinds of activation checkpointing that it offers.
        records: Whether it can record routes in its own forward pass.
        installs: How often targets are given to routers; ``None``: the adapter does not report it.
        models: Roles of other models in the same process, in which nothing may be replayed
            (``critic``, ``reference``, ``teacher``).
        mtp: Whether the policy has MTP layers with routers; report their calls with the model
            ``mtp``.
        unsupported: Kinds of routers that it must refuse; ``variant(name)`` makes each.
        tolerates: Defects of routes that it accepts by design: a row without a valid target is a
            free row.
        trains_gates: ``False`` if gates get no gradient: they are frozen, or ``top_k=1`` with
            normalised weights leaves them none.
        microbatches: Microbatches of a step.
        microbatch_size: Samples of a microbatch.
        tolerance: The largest relative difference of loss and gradients between two runs that
            should agree. 0: bit for bit; then a model that ``torch.compile`` compiles again for
            another width may sum in another order.
        float_digits: Decimal digits that its loss carries.
        parallel: How the model is split, in words.
    """

    mode: ReplayMode
    free_rows: FreeRows
    vocab: int
    recompute: tuple[Recompute, ...] = (Recompute.NONE,)
    records: bool = False
    installs: Installs | None = None
    models: tuple[str, ...] = ()
    mtp: bool = False
    unsupported: tuple[str, ...] = ()
    tolerates: tuple[Defect, ...] = ()
    trains_gates: bool = True
    microbatches: int = 2
    microbatch_size: int = 2
    tolerance: float = 0.0
    float_digits: int = 7
    parallel: str = ""

    def __post_init__(self) -> None:
        problems = [*self._coerce(), *self._problems()]
        if problems:
            raise ContractError("The replay terms cannot be used:\n  - " + "\n  - ".join(problems))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; ``from_dict`` is its inverse."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``ContractError`` on unknown or missing keys."""
        valid = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - valid)
        if unknown:
            raise ContractError(f"Unknown replay terms {unknown}; valid terms are {sorted(valid)}.")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        try:
            return cls(**values)
        except TypeError as error:
            raise ContractError(
                f"The replay terms are incomplete: {error}. Required: mode, free_rows, vocab."
            ) from error

    def _coerce(self) -> list[str]:
        """Accept plain strings in place of enum members."""
        problems = []
        # contracts come from JSON and TOML, too, which have no enums
        for name, kind in _ENUMS.items():
            if name == "installs" and self.installs is None:
                continue
            value: Any = getattr(self, name)
            several = name in _TUPLES
            try:
                members = tuple(map(kind, value)) if several else kind(value)
            except (ValueError, TypeError):
                problems.append(
                    f"{name}={value!r} is not valid; choose {'some' if several else 'one'} of"
                    f" {[str(member) for member in kind]}."
                )
                continue
            object.__setattr__(self, name, members)
        return problems

    def _problems(self) -> list[str]:
        problems = [
            f"{name}={getattr(self, name)!r} must be a whole number >= {minimum}."
            for name, minimum in (
                ("vocab", 2),
                ("microbatches", 1),
                ("microbatch_size", 1),
                ("float_digits", 1),
            )
            if not isinstance(getattr(self, name), int)
            # True is an int
            or isinstance(getattr(self, name), bool)
            or getattr(self, name) < minimum
        ]
        problems += [
            f"{name}={getattr(self, name)!r} must be a tuple of names."
            for name in ("models", "unsupported")
            if not isinstance(getattr(self, name), tuple)
            or not all(isinstance(item, str) and item for item in getattr(self, name))
        ]
        flags = {name: getattr(self, name) for name in ("records", "mtp", "trains_gates")}
        problems += [
            f"{name}={value!r} must be True or False."
            for name, value in flags.items()
            if not isinstance(value, bool)
        ]
        tolerance: object = self.tolerance
        if (
            not isinstance(tolerance, int | float)
            or isinstance(tolerance, bool)
            or not 0 <= tolerance < 1
        ):
            problems.append(
                f"tolerance={self.tolerance!r} must be a number from 0 (bit for bit) to 1."
            )
        # R2 replays what the trainer's own old-logprob pass recorded
        if self.mode == ReplayMode.R2 and not self.records:
            problems.append(
                "mode='R2' replays what the trainer records: records=True must be declared."
            )
        if {"policy", "mtp"} & set(self.models):
            problems.append(
                "models names models of other roles: 'policy' is the one that is trained, and MTP"
                " layers are declared by mtp=True."
            )
        return problems


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


_ENUMS: Mapping[str, type[StrEnum]] = {
    "mode": ReplayMode,
    "free_rows": FreeRows,
    "recompute": Recompute,
    "installs": Installs,
    "tolerates": Defect,
}
_TUPLES = ("recompute", "tolerates")
