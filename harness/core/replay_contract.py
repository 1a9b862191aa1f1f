"""Terms: what a trainer with routing replay declares beside the convention of its payload.

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
    """Where the routes that a training step replays were recorded."""

    R2 = "R2"
    """In the trainer's own old-logprob pass."""
    R3 = "R3"
    """In the rollout engine; the old-logprob pass replays them, too."""


class FreeRows(StrEnum):
    """What the routers do with a row that has no target: the final token, a row that was not
    captured, padding.
    """

    NATIVE = "native"
    """They choose by their own scores."""
    DUMMY = "dummy"
    """They execute a filler of top_k distinct experts."""


class Recompute(StrEnum):
    """What is computed anew in the backward pass (activation checkpointing)."""

    NONE = "none"
    SELECTIVE = "selective"
    """Parts of a layer; whether its router is among them is not said."""
    FULL = "full"
    """Whole layers: every router is called a second time."""


class Installs(StrEnum):
    """How often a target is given to a router."""

    PER_CALL = "per-call"
    """Once for each forward call of a router: per microbatch and layer."""
    PER_STEP = "per-step"
    """Once per router and step, for all microbatches."""


class Defect(StrEnum):
    """What may be wrong with the routes that a trainer is given."""

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
    """A negative expert id, where the contract's filler is not ``minus-one``."""
    TOO_LARGE = "too-large"
    """An expert id of ``num_experts`` or more."""
    ZERO_ROWS = "zero-rows"
    """Rows of zeros: expert 0, top_k times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayTerms:
    """How a trainer replays; frozen, and complete or refused.

    ``vocab`` is the number of token ids that its model knows. ``recompute`` are the ways that it
    offers, ``records`` whether it can record in a pass of its own, ``installs`` how often targets
    are given to routers (``None``: the adapter does not tell). ``models`` names models of other
    roles that live beside the policy and must never be replayed (``critic``, ``reference``,
    ``teacher``); ``mtp`` says that the policy has MTP layers with routers, which are told under the
    model ``mtp``. ``unsupported`` names kinds of routers that it must refuse, made by
    ``variant(name)``. ``tolerates`` are defects of routes that it accepts by design: what has no
    valid target is then a free row. ``trains_gates`` is ``False`` where gates get no gradient: they
    are frozen, or ``top_k=1`` with normalised weights leaves them none. A step has ``microbatches``
    of ``microbatch_size`` samples. ``tolerance`` is the largest relative difference of loss and
    gradients between two runs that ought to agree (0: bit for bit; what ``torch.compile`` makes
    anew for another width may then sum the first one otherwise), ``float_digits`` how many decimal
    digits its loss carries. ``parallel`` says in words how the model is split.

    Raises ``ContractError``, listing every problem at once.
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
        """JSON-ready form; ``from_dict`` is its inverse."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``ContractError`` on unknown or missing keys."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ContractError(f"Unknown replay terms {unknown}; valid terms are {sorted(known)}.")
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
        for name, kind in _ENUMS.items():
            value: Any = getattr(self, name)
            many = name in _MANY
            try:
                made = (
                    tuple(kind(one) for one in value)
                    if many
                    else None
                    if value is None and name == "installs"
                    else kind(value)
                )
            except (ValueError, TypeError):
                problems.append(
                    f"{name}={value!r} is not valid; choose {'some' if many else 'one'} of"
                    f" {[str(one) for one in kind]}."
                )
                continue
            object.__setattr__(self, name, made)
        return problems

    def _problems(self) -> list[str]:
        problems = [
            f"{name}={getattr(self, name)!r} must be a whole number >= {least}."
            for name, least in (
                ("vocab", 2),
                ("microbatches", 1),
                ("microbatch_size", 1),
                ("float_digits", 1),
            )
            if not isinstance(getattr(self, name), int)
            or isinstance(getattr(self, name), bool)
            or getattr(self, name) < least
        ]
        problems += [
            f"{name}={getattr(self, name)!r} must be a tuple of names."
            for name in ("models", "unsupported")
            if not isinstance(getattr(self, name), tuple)
            or not all(isinstance(one, str) and one for one in getattr(self, name))
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
    return (
        [_plain(one) for one in value]
        if isinstance(value, tuple)
        else str(value)
        if isinstance(value, StrEnum)
        else value
    )


_ENUMS: Mapping[str, type[StrEnum]] = {
    "mode": ReplayMode,
    "free_rows": FreeRows,
    "recompute": Recompute,
    "installs": Installs,
    "tolerates": Defect,
}
_MANY = ("recompute", "tolerates")
