"""Known bugs of the further columns of batches: advantages, rewards, versions and groups that lose
their tokens, rows or samples on the way into training rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollproof.core.batch_columns import Column
from rollproof.core.records import BatchRow, ColumnArray, Rollout, Scalar
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_batches import CollatedBatch, ColumnCollator

__all__ = ["BUGS"]

_GROUP_SIZE = 2


class _ColumnOfLastStep(ColumnCollator):
    """Gives each row of a group the advantages of the group's last row, as that row has them."""

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        rows = super().rows(batch)
        # the last of equal keys wins
        last = {row.values["group"]: row.columns["advantages"] for row in rows}
        return [
            replace(row, columns={**row.columns, "advantages": last[row.values["group"]]})
            for row in rows
        ]


class _ColumnByStride(ColumnCollator):
    """Cuts the advantages of all samples into pieces of one length, that of the first sample."""

    def collate(self, samples: list[Rollout]) -> CollatedBatch:
        for sample in samples:
            self.check(sample)
        flat = np.concatenate([sample.columns["advantages"] for sample in samples])
        stride = len(samples[0].response_ids)
        cut: list[Rollout] = []
        for i, sample in enumerate(samples):
            # a piece beyond the end begins again at the front
            places = np.arange(len(sample.response_ids)) + i * stride
            piece = flat[places % max(len(flat), 1)] if len(flat) else flat
            cut.append(replace(sample, columns={**sample.columns, "advantages": piece}))
        return super().collate(cut)


class _ColumnBalancedApart(ColumnCollator):
    """Balances rows over ranks by length, and leaves the advantages in the order of the samples."""

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        rows = super().rows(batch)
        order = _by_length(rows)
        return [
            replace(
                rows[i],
                columns={**rows[i].columns, "advantages": rows[place].columns["advantages"]},
            )
            for place, i in enumerate(order)
        ]


class _ValuesBalancedApart(ColumnCollator):
    """Balances rows over ranks by length, and leaves the rewards in the order of the samples."""

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        rows = super().rows(batch)
        order = _by_length(rows)
        return [
            replace(rows[i], values={**rows[i].values, "reward": rows[place].values["reward"]})
            for place, i in enumerate(order)
        ]


def _by_length(rows: list[BatchRow]) -> list[int]:
    """Return the order in which a balancer takes rows: the longest first."""
    lengths = [int(np.sum(row.attention)) for row in rows]
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


class _GroupsByStride(ColumnCollator):
    """Takes each two rows for a group, also if a group has lost a sample."""

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        rows = super().rows(batch)
        return [
            replace(row, values={**row.values, "group": _label(i // _GROUP_SIZE)})
            for i, row in enumerate(rows)
        ]


def _label(number: int) -> Scalar:
    return f"group {number}"


class _ColumnOfLabels(ColumnCollator):
    """Places reference logprobs where their labels are: one place before their tokens."""

    def column(self, sample: Rollout, column: Column) -> ColumnArray:
        row = super().column(sample, column)
        return np.roll(row, -1) if column.name == "ref_logprobs" else row


class _ColumnFilledWithZeros(ColumnCollator):
    """Pads versions with zeros, the number of the first weights."""

    def column(self, sample: Rollout, column: Column) -> ColumnArray:
        row = super().column(sample, column)
        return np.where(row == -1, 0, row) if column.name == "versions" else row


class _RewardAtLastPlace(ColumnCollator):
    """Puts the reward at the last place of the padded line in place of the last token."""

    def column(self, sample: Rollout, column: Column) -> ColumnArray:
        row = super().column(sample, column)
        if column.name != "rm_scores":
            return row
        moved = np.zeros_like(row)
        moved[-1] = row.sum()
        return moved


class _ColumnDroppedByUnion(ColumnCollator):
    """Keeps the columns of the second shard only as far as tokens, masks and logprobs go."""

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        rows = super().rows(batch)
        half = (len(rows) + 1) // 2
        return [*rows[:half], *(replace(row, columns={}) for row in rows[half:])]


class _ColumnTakesAnything(ColumnCollator):
    """Pads a column that is too short with zeros, and cuts one that is too long."""

    def check(self, sample: Rollout) -> None:
        """Check the other fields alone."""
        fitted = {
            name: np.resize(
                values, sample.total if name == "versions" else len(sample.response_ids)
            )
            for name, values in sample.columns.items()
        }
        super().check(replace(sample, columns=fitted))

    def numbers(self, sample: Rollout, column: Column) -> ColumnArray:
        values = super().numbers(sample, column)
        tokens = sample.total if column.name == "versions" else len(sample.response_ids)
        padding = np.zeros(max(0, tokens - len(values)), values.dtype)
        return np.concatenate([values, padding])[:tokens]


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="column-of-last-step",
        summary=(
            "Every step of a trajectory gets the advantages of its last step, at the places of that"
            " step's response."
        ),
        refs=("SkyRL#1492", "SkyRL#1507"),
        kind="batches",
        make=_ColumnOfLastStep,
        detected_by=("batch.columns",),
        may_fail=("batch.column-filler",),
    ),
    KnownBug(
        id="column-by-stride",
        summary="Advantages of all samples are cut into pieces of one length.",
        refs=("cf. AReaL#1419",),
        kind="batches",
        make=_ColumnByStride,
        detected_by=("batch.columns",),
    ),
    KnownBug(
        id="column-balanced-apart",
        summary=(
            "Samples are balanced over the ranks by length, and their advantages stay in the old"
            " order."
        ),
        refs=("cf. slime utils/data.py (local_raw_reward)", "cf. AReno#524"),
        kind="batches",
        make=_ColumnBalancedApart,
        detected_by=("batch.columns",),
        may_fail=("batch.column-filler",),
    ),
    KnownBug(
        id="values-balanced-apart",
        summary=(
            "Samples are balanced over the ranks by length, and their rewards stay in the old"
            " order."
        ),
        refs=("cf. slime utils/data.py (local_raw_reward)",),
        kind="batches",
        make=_ValuesBalancedApart,
        detected_by=("batch.values",),
    ),
    KnownBug(
        id="groups-by-stride",
        summary=(
            "Groups are pieces of a fixed number of rows: after a group that lost a sample, rows"
            " are normalised with those of other prompts."
        ),
        refs=("AReaL#1419", "AReaL#1454"),
        kind="batches",
        make=_GroupsByStride,
        detected_by=("batch.values",),
    ),
    KnownBug(
        id="column-of-labels",
        summary="Logprobs of the reference model are one place before their tokens.",
        refs=("cf. SkyRL#1304", "cf. prime-rl#1525"),
        kind="batches",
        make=_ColumnOfLabels,
        detected_by=("batch.columns",),
        may_fail=("batch.column-filler",),
    ),
    KnownBug(
        id="column-filled-with-zeros",
        summary="Places without a token have version 0, that of the first weights, in place of -1.",
        refs=("cf. AReaL utils/data.py (versions)",),
        kind="batches",
        make=_ColumnFilledWithZeros,
        detected_by=("batch.column-filler",),
    ),
    KnownBug(
        id="reward-at-last-place",
        summary="The reward is at the last place of a padded line, and not at the last token.",
        refs=("cf. miles#1827",),
        kind="batches",
        make=_RewardAtLastPlace,
        detected_by=("batch.columns",),
        may_fail=("batch.column-filler",),
    ),
    KnownBug(
        id="column-dropped-by-union",
        summary="The shards of two ranks are merged, and further columns of the second are lost.",
        refs=("cf. AReno#524",),
        kind="batches",
        make=_ColumnDroppedByUnion,
        detected_by=("batch.columns",),
    ),
    KnownBug(
        id="column-takes-anything",
        summary="Further columns whose length does not fit the tokens are padded or cut silently.",
        refs=("cf. verl#6027", "cf. prime-rl#3431"),
        kind="batches",
        make=_ColumnTakesAnything,
        detected_by=("batch.refuses",),
    ),
)
