"""Token pairs: the logprobs that rollout and trainer gave to the same tokens, in sequence order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.errors import GapError
from rollproof.gap.column_checks import (
    BoolArray,
    FloatArray,
    IntArray,
    check_optional,
    counted,
    require_not_positive,
    require_same_length,
    require_same_tokens,
    to_labels,
    to_logprobs,
    to_mask,
)
from rollproof.gap.groups import Grouping, to_grouping

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
    "previous_logprob": (
        "logprob of the token under the trainer's weights before those that sampled it"
    ),
    "temperature": "sampling temperature that was declared for the token",
    "since_resume": (
        "tokens since the last resume boundary of the sequence (0: the first token after it);"
        " negative: none before it"
    ),
    "part": "prompt, tool or response",
    "batch": "training batch of the sequence",
    "replica": "engine replica that sampled the token",
    "pack_index": "place of the sequence in the row that the trainer packed it into (0: the first)",
    "rollout_routes": "experts that the engine used, one list a layer",
    "trainer_routes": "experts that the trainer used, one list a layer",
}
"""Columns that a table of pairs may have; the first four are required."""

_OPTIONAL = (
    "token_id",
    "trainer_token_id",
    "position",
    "version",
    "current_version",
    "since_resume",
    "batch",
    "replica",
    "part",
    "current_logprob",
    "previous_logprob",
    "temperature",
    "pack_index",
)
_ROUTES = ("rollout_routes", "trainer_routes")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPairs:
    """Loss-masked tokens with two logprobs; tokens of one sequence are adjacent and in order.

    Logprobs that are not finite stay in: the panel counts them, and no average includes them.

    Attributes:
        rollout: ``(n,)`` float64, in nats.
        trainer: ``(n,)`` float64, in nats.
        starts: ``(sequences,)``: the first token of each sequence.
        sequences: the names of the sequences.
        columns: optional ``(n,)`` columns by name (``COLUMNS``).
        routes: ``rollout_routes`` and ``trainer_routes``, ``(n, layers, top_k)``, if recorded.
        by_version: the trainer's logprobs ``(n,)`` under each of several weight versions.
        groups: labels of the user's own, by name.
        masked: tokens that the mask left out.
        scattered: sequences whose rows were in several places, with no position to order them.
    """

    rollout: FloatArray
    trainer: FloatArray
    starts: IntArray
    sequences: Sequence[Any]
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    routes: Mapping[str, IntArray] = field(default_factory=dict)
    by_version: Mapping[Any, FloatArray] = field(default_factory=dict)
    groups: Mapping[str, Grouping] = field(default_factory=dict)
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

    @property
    def index_in_sequence(self) -> IntArray:
        """``(n,)``: number of each token in its sequence, from 0."""
        return np.arange(self.n_tokens) - np.repeat(self.starts, self.lengths)

    @property
    def finite(self) -> BoolArray:
        """``(n,)``: whether both logprobs are finite."""
        return np.isfinite(self.rollout) & np.isfinite(self.trainer)

    @property
    def abs_diff(self) -> FloatArray:
        """``(n,)``: |d|; NaN if a logprob is not finite."""
        with np.errstate(invalid="ignore"):
            size = np.abs(self.trainer - self.rollout)
        # infinity minus infinity is NaN already, and a single infinity would be a largest |d|
        size[~np.isfinite(size)] = np.nan
        return size

    def describe(self, token: int) -> dict[str, Any]:
        """Return sequence, position and logprobs of one token, for a report."""
        sequence = int(np.searchsorted(self.starts, token, side="right")) - 1
        position = (
            self.columns["position"][token]
            if "position" in self.columns
            else token - int(self.starts[sequence])
        )
        out = {"sequence": _to_json(self.sequences[sequence]), "position": int(position)}
        if "token_id" in self.columns:
            out["token_id"] = _to_json(self.columns["token_id"][token])
        return out | {
            "rollout_logprob": float(self.rollout[token]),
            "trainer_logprob": float(self.trainer[token]),
        }

    def select(self, mask: BoolArray) -> TokenPairs:
        """Return the pairs of the tokens in ``mask`` ``(n,)``."""
        owner = self.owner[mask]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        return TokenPairs(
            rollout=self.rollout[mask],
            trainer=self.trainer[mask],
            starts=first,
            sequences=[self.sequences[i] for i in owner[first]],
            columns={name: column[mask] for name, column in self.columns.items()},
            routes={name: array[mask] for name, array in self.routes.items()},
            by_version={version: array[mask] for version, array in self.by_version.items()},
            groups={name: grouping.select(mask) for name, grouping in self.groups.items()},
            masked=self.masked + int(len(mask) - mask.sum()),
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
        groups: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> TokenPairs:
        """Check the columns (``COLUMNS``), each ``(n,)``, and lay them out by sequence.

        The tokens of a sequence keep their order, unless ``position`` is given and decides it.
        ``rollout_routes`` and ``trainer_routes`` are ``(n, layers, top_k)``. ``by_version`` maps
        weight versions to the trainer's logprobs under them, ``groups`` names of labels to one
        label a token. Raises ``GapError`` that says what to change.
        """
        _check_names(columns, by_version, groups)
        rollout = to_logprobs(rollout_logprob, "rollout_logprob")
        trainer = to_logprobs(trainer_logprob, "trainer_logprob")
        optional = {
            name: check_optional(column, name)
            for name, column in columns.items()
            if column is not None
        }
        labels = to_labels(sequence_id, "sequence_id", missing=False)
        names, codes = np.unique(labels, return_inverse=True)
        counts = to_mask(mask)
        versions = {
            version: to_logprobs(column, f"trainer_logprob@{version}")
            for version, column in (by_version or {}).items()
        }
        scores = {"rollout_logprob": rollout, "trainer_logprob": trainer}
        scores |= {f"trainer_logprob@{version}": column for version, column in versions.items()}
        scores |= {
            name: optional[name]
            for name in ("current_logprob", "previous_logprob")
            if name in optional
        }
        groupings = {name: to_grouping(labels, name) for name, labels in (groups or {}).items()}
        # before any column is indexed by rows of another one
        require_same_length(
            scores
            | {"sequence_id": codes, "mask": counts}
            | optional
            | {f"group {name}": grouping.codes for name, grouping in groupings.items()}
        )
        # masked tokens may hold anything: prompts often have a logprob of 0, padding has garbage
        for name, column in scores.items():
            require_not_positive(column, counts, name)
        require_same_tokens(optional, counts)

        position = optional.get("position")
        order = _row_order(codes, position)
        scattered = 0 if position is not None or order is None else _count_scattered(codes)
        if order is not None:
            rows: IntArray | None = order[counts[order]]
        else:
            # ten million rows that are in order already are not copied
            rows = None if counts.all() else np.flatnonzero(counts)

        def take(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return array if rows is None else array[rows]

        codes = take(codes)
        if position is not None:
            _require_distinct(names, codes, take(position))
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        return cls(
            rollout=take(rollout),
            trainer=take(trainer),
            starts=starts,
            sequences=[names[i] for i in codes[starts]],
            columns={name: take(optional[name]) for name in _OPTIONAL if name in optional},
            routes={name: take(optional[name]) for name in _ROUTES if name in optional},
            by_version={version: take(column) for version, column in versions.items()},
            groups={
                name: grouping if rows is None else grouping.select(rows)
                for name, grouping in groupings.items()
            },
            masked=int(len(counts) - counts.sum()),
            scattered=scattered,
        )


def _check_names(columns: Mapping[str, Any], by_version: Any, groups: Any) -> None:
    """Raise ``GapError`` for columns that do not exist, and for versions and names of groups that
    are no labels.
    """
    if not isinstance(groups, Mapping | None):
        raise GapError(
            "groups must map a name to one label a token, such as"
            f" {{'modality': labels}}, not be a {type(groups).__name__}."
        )
    unnamed = [name for name in groups or {} if not isinstance(name, str) or not name.strip()]
    if unnamed:
        raise GapError(f"A group must have a name, not {unnamed[0]!r}.")
    if not isinstance(by_version, Mapping | None):
        raise GapError(
            "by_version must map each weight version to a column of logprobs, not be a"
            f" {type(by_version).__name__}."
        )
    wrong = [
        version
        for version in by_version or {}
        if isinstance(version, bool) or not isinstance(version, int | str | np.integer)
    ]
    if wrong:
        raise GapError(
            f"by_version has the version {wrong[0]!r}: versions are whole numbers or text."
        )
    unknown = sorted(set(columns) - set(COLUMNS))
    if unknown:
        raise GapError(
            f"No column is named {', '.join(unknown)}. A table of pairs may have:"
            f" {', '.join(COLUMNS)}."
        )


def _to_json(value: Any) -> Any:
    """A label as JSON has it; ``None`` if it is missing."""
    value = value.item() if isinstance(value, np.generic) else value
    # NaN is the only label that differs from itself
    return None if value != value else value


def _row_order(codes: IntArray, position: npt.NDArray[Any] | None) -> IntArray | None:
    """Row order that brings sequences together; ``None`` if they already are."""
    if position is not None:
        steps = np.diff(codes)
        if bool((steps > 0).any() or (steps < 0).any()) or bool((np.diff(position) < 0).any()):
            # numpy sorts by the last key first: by sequence, then by position
            return np.lexsort((position, codes))
        return None
    return None if bool((np.diff(codes) >= 0).all()) else np.argsort(codes, kind="stable")


def _count_scattered(codes: IntArray) -> int:
    """Count the sequences with rows in several places."""
    begins = np.flatnonzero(np.diff(codes, prepend=-1))
    return int((np.bincount(codes[begins]) > 1).sum())


def _require_distinct(names: npt.NDArray[Any], codes: IntArray, position: npt.NDArray[Any]) -> None:
    """Raise ``GapError`` if two tokens, sorted by sequence and position, share both."""
    repeated = np.flatnonzero((np.diff(codes) == 0) & (np.diff(position) == 0))
    if len(repeated):
        at = int(repeated[0])
        raise GapError(
            f"{counted(len(repeated), 'token', 'have')} the sequence_id and the position of another"
            f" (the first: sequence {names[codes[at]]}, position {position[at]}): give each sample"
            " its own sequence_id, such as prompt and number of the sample."
        )
