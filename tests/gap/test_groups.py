"""Labels of the user's own: which groups are named, and which are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollproof.cli.app import run
from rollproof.errors import GapError
from rollproof.gap import GapReport, measure
from rollproof.gap.diagnosis.causes import Cause
from rollproof.gap.pair_files import read_pairs
from tests.support.gap_faults import GapWorld, gap_columns
from tests.support.measured_gap import sampled

SEQUENCES, LENGTH = 60, 60
N = SEQUENCES * LENGTH
IDS = np.repeat(np.arange(SEQUENCES), LENGTH)
MODALITY = np.where(np.arange(SEQUENCES) % 3, "text", "image")


def compared(factor: Any = 1.0, *, seed: int = 0, **groups: Any) -> GapReport:
    """A gap whose noise is ``factor`` times the usual, one number a sequence."""
    rng = np.random.default_rng(seed)
    rollout = sampled(rng, N).reshape(SEQUENCES, LENGTH)
    noise = 0.03 * np.reshape(factor, (-1, 1)) * (1 - np.exp(rollout))
    trainer = np.minimum(rollout + noise * rng.standard_normal(rollout.shape), 0.0)
    return measure(
        rollout.ravel(),
        trainer.ravel(),
        sequence_id=IDS,
        mask=np.ones(N),
        groups={name: np.repeat(labels, LENGTH) for name, labels in groups.items()},
        resamples=100,
    )


def causes(report: GapReport) -> dict[str, Cause]:
    return {str(cause.name): cause for cause in report.causes}


def test_the_groups_that_differ_are_named() -> None:
    """Of two labels, only the one by which sequences differ; its other values are compared with."""
    source = np.array(["web", "code", "maths", "chat"])[np.arange(SEQUENCES) % 4]
    report = compared(
        np.where(np.isin(source, ["web", "code"]), 3.0, 1.0), modality=MODALITY, source=source
    )
    because = causes(report)["one group differs"].because

    assert ["source code", "source web"] == sorted(
        part.partition(" has ")[0] for part in because.split("; ")
    )
    assert {"modality", "source"} <= set(report.buckets)
    assert ["image", "text"] == [bucket.label for bucket in report.buckets["modality"]]


def test_a_cause_of_one_group_is_named_for_it() -> None:
    """The trainer scores prompts with an image at another temperature: that, and not only that they
    differ; if all do it, no group is blamed.
    """
    length = 150
    world = GapWorld(sequences=SEQUENCES, length=length)
    good, bad = (
        gap_columns(fault, seed=1, world=world)
        for fault in ("numerics only", "raw logprobs, T=0.6")
    )
    image = np.repeat(MODALITY == "image", length)
    groups = {"modality": np.repeat(MODALITY, length)}

    def found(wrong: Any) -> dict[str, Cause]:
        columns = {
            side: np.where(wrong, bad[side], good[side])
            for side in ("rollout_logprob", "trainer_logprob")
        }
        ids = {name: good[name] for name in ("sequence_id", "mask")}
        return causes(measure(**columns, **ids, groups=groups, resamples=100))

    name = "temperature or logprob mode"
    one, both = found(image), found(np.ones(len(image), bool))
    assert one[name].because.startswith("in modality image alone: the rollout logprob alone")
    assert "one group differs" not in one
    assert "modality" not in both[name].because


def test_groups_of_harder_prompts_do_not_differ() -> None:
    """What tokens of similar logprob show elsewhere is no fault of the group."""
    rng = np.random.default_rng(1)
    rollout = sampled(rng, N).reshape(SEQUENCES, LENGTH)
    hard = np.argsort(np.argsort(rollout.mean(axis=1))) < 20
    trainer = rollout + 0.1 * (1 - np.exp(rollout)) * rng.standard_normal(rollout.shape)
    report = measure(
        rollout.ravel(),
        np.minimum(trainer, 0.0).ravel(),
        sequence_id=IDS,
        mask=np.ones(N),
        groups={"level": np.repeat(np.where(hard, "hard", "easy"), LENGTH)},
        resamples=100,
    )

    assert {"numerics only"} == set(causes(report))


def test_many_labels_accuse_none_by_chance() -> None:
    """Of 20 healthy runs with four labels of twelve values each, none names a group."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        groups = {f"label {i}": rng.integers(12, size=SEQUENCES) for i in range(4)}
        cluster = np.exp(0.5 * rng.standard_normal(SEQUENCES))
        assert {"numerics only"} == set(causes(compared(cluster, seed=seed, **groups)))


def test_tokens_of_one_sequence_may_be_in_several_groups() -> None:
    """A label of tokens: the answer differs, the thought before it does not; some have no label."""
    rng = np.random.default_rng(2)
    rollout = sampled(rng, N).reshape(SEQUENCES, LENGTH)
    part = np.where(np.arange(LENGTH) < 30, "thought", "answer").astype(object)
    part[:3] = None
    scale = np.where(part == "answer", 0.1, 0.03)
    trainer = rollout + scale * (1 - np.exp(rollout)) * rng.standard_normal(rollout.shape)
    report = measure(
        rollout.ravel(),
        np.minimum(trainer, 0.0).ravel(),
        sequence_id=IDS,
        mask=np.ones(N),
        groups={"phase": np.tile(part, SEQUENCES)},
        resamples=100,
    )

    assert causes(report)["one group differs"].because.startswith("phase answer has ")
    assert [1800, 1620] == [bucket.tokens for bucket in report.buckets["phase"]]


def test_a_rare_value_is_told() -> None:
    """Values in a handful of sequences are not compared, and a note says so."""
    rare = np.where(np.arange(SEQUENCES) < 3, "rare", "usual")

    assert (
        "1 value is in fewer than 5 sequences, of the group kind (rare): too few to be compared."
        in compared(kind=rare).notes
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([1], "groups must map a name to one label a token, such as .*, not be a list"),
        ({"": np.zeros(N, int)}, "A group must have a name, not ''"),
        ({3: np.zeros(N, int)}, "A group must have a name, not 3"),
        ({"size": np.arange(N)}, "The group size has 3,600 values, and at most 24 can be compared"),
        ({"size": np.zeros(7, int)}, "The columns differ in length"),
        ({"size": np.full(N, 0.5)}, "group size must hold whole numbers or text"),
    ],
)
def test_a_group_that_cannot_be_compared_is_refused(groups: Any, message: str) -> None:
    """A name, one label a token, and few values."""
    with pytest.raises(GapError, match=message):
        measure(np.zeros(N), np.zeros(N), sequence_id=IDS, mask=np.ones(N), groups=groups)


def records(path: Path, **columns: Any) -> Path:
    rng = np.random.default_rng(0)
    rollout = sampled(rng, N)
    noise = np.where(np.repeat(MODALITY == "image", LENGTH), 0.1, 0.02)
    trainer = rollout + noise * (1 - np.exp(rollout)) * rng.standard_normal(N)
    table = {
        "sequence_id": IDS,
        "rollout_logprob": rollout,
        "trainer_logprob": np.minimum(trainer, 0.0),
        "mask": np.ones(N, bool),
        "kind of prompt": np.repeat(MODALITY, LENGTH),
        "replica": IDS % 2,
        **columns,
    }
    pq.write_table(pa.table(table), path)
    return path


def test_a_column_of_a_file_is_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--group`` takes any column, also one that has a meaning already, and several of them."""
    path = records(tmp_path / "gap.parquet")
    run(["gap", str(path), "--group", "kind of prompt", "--group", "replica"])
    text = " ".join(capsys.readouterr().out.split())

    assert "one group differs" in text
    assert "kind of prompt image has" in text
    pairs = read_pairs(path, groups=["kind of prompt", "replica"])
    assert ["image", "text"] == list(pairs.groups["kind of prompt"].labels)
    assert ["0", "1"] == list(pairs.groups["replica"].labels)
    assert "replica" in pairs.columns


def test_a_group_that_the_file_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the nearest name, and the names that there are."""
    path = records(tmp_path / "gap.parquet")

    assert 254 == run(["gap", str(path), "--group", "replicas"])
    assert "has no column replicas to group by (perhaps --group replica). It has" in " ".join(
        capsys.readouterr().err.split()
    )
    trace = ["--rollout", "t.json", "--trainer", "x"]
    assert 254 == run(["gap", *trace, "--group", "replica"])
    assert "--group names a column of RECORDS" in capsys.readouterr().err
