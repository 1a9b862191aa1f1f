"""Pairs: the logprobs that two sides gave to the same tokens, checked and laid out by sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray
from rollproof.errors import GapError
from rollproof.gap.column_checks import (
    BoolArray,
    FloatArray,
    counted,
    labels,
    logprobs,
    mask_column,
    never_positive,
    same_length,
    same_tokens,
    side_column,
)

__all__ = ["COLUMNS", "BoolArray", "FloatArray", "TokenPairs"]

COLUMNS: Mapping[str, str] = {
    "sequence_id": "which sequence the token belongs to (integer or text)",
    "rollout_logprob": (
        "natural logarithm of the probability that the rollout engine reports for the token"
    ),
    "trainer_logprob": (
        "natural logarithm of the probability that the trainer gives to the same token, under the"
        " version that sampled it"
    ),
    "mask": "whether the loss counts the token",
    "token_id": "the token, as the rollout has it",
    "trainer_token_id": "the token, as the trainer scored it: any difference is an error",
    "position": "absolute position in prompt + response",
    "version": "weight version that sampled the token",
    "current_logprob": (
        "logprob of the token under the trainer's current weights, where those are newer"
    ),
    "current_version": "weight version of current_logprob",
    "temperature": "sampling temperature that was declared for the token",
    "since_resume": (
        "tokens since the last resume boundary of the sequence (0: the first token after it);"
        " negative: none before it"
    ),
    "part": "prompt, tool or response",
    "batch": "training batch of the sequence",
    "replica": "engine replica that sampled the token",
    "rollout_routes": "experts that the engine used, one list a layer",
    "trainer_routes": "experts that the trainer used, one list a layer",
}
"""Columns that a table of pairs may have; the first four must be there."""

_SIDES = (
    "token_id",
    "trainer_token_id",
    "position",
    "version",
    "current_version",
    "since_resume",
    "batch",
    "replica",
    "part",
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPairs:
    """Loss-masked tokens with the logprob of either side; tokens of one sequence stand together, in
    order.

    ``rollout`` and ``trainer`` are ``(n,)`` float64 (natural log), ``starts`` is ``(sequences,)``
    with the first token of each sequence, ``sequences`` their names. ``sides`` holds optional
    ``(n,)`` columns by name (``COLUMNS``); ``routes`` the optional ``(n, layers, top_k)`` arrays
    ``rollout_routes`` and ``trainer_routes``; ``by_version`` the trainer's logprobs ``(n,)`` under
    each of several weight versions; ``masked`` counts the tokens that the mask left out,
    ``scattered`` the sequences whose rows stood in several places with no position to tell their
    order. Logprobs that are not finite are kept: the panel counts them, and nothing averages over
    them.
    """

    rollout: FloatArray
    trainer: FloatArray
    starts: IntArray
    sequences: Sequence[Any]
    sides: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    routes: Mapping[str, IntArray] = field(default_factory=dict)
    by_version: Mapping[Any, FloatArray] = field(default_factory=dict)
    masked: int = 0
    scattered: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens that the loss counts."""
        return len(self.rollout)

    @property
    def n_sequences(self) -> int:
        """Sequences with at least one such token."""
        return len(self.starts)

    @property
    def lengths(self) -> IntArray:
        """``(sequences,)``: tokens of each sequence."""
        return np.diff(np.append(self.starts, self.n_tokens))

    @property
    def owner(self) -> IntArray:
        """``(n,)``: index of each token's sequence."""
        return np.repeat(np.arange(self.n_sequences), self.lengths)

    def where(self, token: int) -> dict[str, Any]:
        """Sequence, position and logprobs of one token, for a report."""
        sequence = int(np.searchsorted(self.starts, token, side="right")) - 1
        place = (
            self.sides["position"][token]
            if "position" in self.sides
            else token - int(self.starts[sequence])
        )
        out = {"sequence": _plain(self.sequences[sequence]), "position": int(place)}
        if "token_id" in self.sides:
            out["token_id"] = _plain(self.sides["token_id"][token])
        return out | {
            "rollout_logprob": float(self.rollout[token]),
            "trainer_logprob": float(self.trainer[token]),
        }

    def chosen(self, keep: BoolArray) -> TokenPairs:
        """The pairs of the tokens where ``keep`` ``(n,)`` holds."""
        owner = self.owner[keep]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        return TokenPairs(
            rollout=self.rollout[keep],
            trainer=self.trainer[keep],
            starts=first,
            sequences=[self.sequences[i] for i in owner[first]],
            sides={name: column[keep] for name, column in self.sides.items()},
            routes={name: array[keep] for name, array in self.routes.items()},
            by_version={version: array[keep] for version, array in self.by_version.items()},
            masked=self.masked + int(len(keep) - keep.sum()),
            scattered=self.scattered,
        )

    @classmethod
    def of(
        cls,
        *,
        rollout_logprob: Any,
        trainer_logprob: Any,
        sequence_id: Any,
        mask: Any,
        by_version: Mapping[Any, Any] | None = None,
        **columns: Any,
    ) -> TokenPairs:
        """Check the columns (``COLUMNS``), each ``(n,)``, and lay them out. Raises ``GapError``
        with every problem's next step.

        The tokens of a sequence keep their order; ``position``, where it is given, decides it.
        ``rollout_routes`` and ``trainer_routes`` are ``(n, layers, top_k)``. ``by_version`` maps
        weight versions to the trainer's logprobs under them.
        """
        if not isinstance(by_version, Mapping | None):
            raise GapError(
                "by_version must map each weight version to a column of logprobs, not be a"
                f" {type(by_version).__name__}."
            )
        strange = [
            version
            for version in by_version or {}
            if isinstance(version, bool) or not isinstance(version, int | str | np.integer)
        ]
        if strange:
            raise GapError(
                f"by_version has the version {strange[0]!r}: versions are whole numbers or text."
            )
        unknown = sorted(set(columns) - set(COLUMNS))
        if unknown:
            raise GapError(
                f"No column is named {', '.join(unknown)}. A table of pairs may have:"
                f" {', '.join(COLUMNS)}."
            )
        rollout, trainer = (
            logprobs(rollout_logprob, "rollout_logprob"),
            logprobs(trainer_logprob, "trainer_logprob"),
        )
        given = {
            name: side_column(column, name)
            for name, column in columns.items()
            if column is not None
        }
        names, codes = np.unique(
            labels(sequence_id, "sequence_id", missing=False), return_inverse=True
        )
        counted = mask_column(mask)
        versions = {
            version: logprobs(column, f"trainer_logprob@{version}")
            for version, column in (by_version or {}).items()
        }
        scores = {"rollout_logprob": rollout, "trainer_logprob": trainer}
        scores |= {f"trainer_logprob@{version}": column for version, column in versions.items()}
        if "current_logprob" in given:
            scores["current_logprob"] = given["current_logprob"]
        same_length(scores | {"sequence_id": codes, "mask": counted} | given)
        for name, column in scores.items():
            never_positive(column, counted, name)
        same_tokens(given, counted)
        order, codes_as_given = _order(codes, given.get("position")), codes
        pick = (
            order[counted[order]]
            if order is not None
            else (None if counted.all() else np.flatnonzero(counted))
        )

        def take(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return array if pick is None else array[pick]

        rollout, trainer, codes = take(rollout), take(trainer), take(codes)
        if "position" in given:
            _once(names, codes, take(given["position"]))
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        return cls(
            rollout=rollout,
            trainer=trainer,
            starts=starts,
            sequences=[names[i] for i in codes[starts]],
            sides={
                name: take(given[name])
                for name in (*_SIDES, "current_logprob", "temperature")
                if name in given
            },
            routes={
                name: take(given[name])
                for name in ("rollout_routes", "trainer_routes")
                if name in given
            },
            by_version={version: take(column) for version, column in versions.items()},
            masked=int(len(counted) - counted.sum()),
            scattered=0 if "position" in given or order is None else _scattered(codes_as_given),
        )


def _plain(value: Any) -> Any:
    """A label as JSON has it; ``None`` for one that is missing."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if value != value else value


def _order(codes: IntArray, position: npt.NDArray[Any] | None) -> IntArray | None:
    """Row order that brings sequences together; ``None`` where they already are."""
    if position is not None:
        steps = np.diff(codes)
        if bool((steps > 0).any() or (steps < 0).any()) or bool((np.diff(position) < 0).any()):
            return np.lexsort((position, codes))
        return None
    return None if bool((np.diff(codes) >= 0).all()) else np.argsort(codes, kind="stable")


def _scattered(codes: IntArray) -> int:
    """Sequences whose rows stand in several places."""
    begins = np.flatnonzero(np.diff(codes, prepend=-1))
    return int((np.bincount(codes[begins]) > 1).sum())


def _once(names: npt.NDArray[Any], codes: IntArray, position: npt.NDArray[Any]) -> None:
    """Tokens are in order of sequence and position."""
    twice = np.flatnonzero((np.diff(codes) == 0) & (np.diff(position) == 0))
    if len(twice):
        at = int(twice[0])
        raise GapError(
            f"{counted(len(twice), 'token', 'have')} the sequence_id and the position of another"
            f" (the first: sequence {names[codes[at]]}, position {position[at]}): give each sample"
            " a sequence_id of its own, such as prompt and number of the sample."
        )
