"""The share of a weight update that arrived: estimate, interval, and what is named by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.gap import GapReport, gap_lines, measure
from rollproof.gap.diagnosis.arrival import Arrival, measure_arrivals
from rollproof.gap.token_pairs import TokenPairs
from rollproof.reporting.text import text_of
from tests.support.gap_faults import GapWorld, gap_columns
from tests.support.gap_profiles import PROFILES, closed_form, noise_scale
from tests.support.measured_gap import sampled

ARRIVAL = {"partly arrived weights", "stale engine weights"}
SEQUENCES, LENGTH = 60, 120
SHAPE = (SEQUENCES, LENGTH)


def updated(
    share: Any = 1.0,
    *,
    seed: int = 0,
    step: float = 0.15,
    scoring: float = 0.0,
    sequences: int = SEQUENCES,
) -> dict[str, Any]:
    """Columns of a rollout with ``share`` (one, or one a sequence) of an update, which moves each
    sequence and each token of it. ``scoring`` is the noise of each of the trainer's scores.
    """
    rng = np.random.default_rng(seed)
    shape = (sequences, LENGTH)
    rollout = np.minimum(sampled(rng, sequences * LENGTH).reshape(shape), -1e-3)
    doubt = 1 - np.exp(rollout)
    update = step * doubt * (rng.standard_normal((sequences, 1)) + rng.standard_normal(shape))
    arrived = np.broadcast_to(np.reshape(share, (-1, 1)), (sequences, 1))
    new = rollout + (1 - arrived) * update
    old = new - update
    numerics = closed_form(rollout, noise_scale(PROFILES["moe-bf16"], *shape, rng), rng) - rollout
    own = [scoring * doubt * rng.standard_normal(shape) for _ in range(2)]
    new, old = (
        np.minimum(score + numerics + noise, 0.0).ravel()
        for score, noise in zip((new, old), own, strict=True)
    )
    return {
        "rollout_logprob": rollout.ravel(),
        "trainer_logprob": new,
        "previous_logprob": old,
        "sequence_id": np.repeat(np.arange(sequences), LENGTH),
        "mask": np.ones(rollout.size),
    }


def estimated(columns: dict[str, Any]) -> Arrival:
    """The share over all tokens."""
    return measure_arrivals(TokenPairs.of(**columns))[0]


def measured(columns: dict[str, Any], **more: Any) -> GapReport:
    return measure(**columns, **more, resamples=100)


def named(report: GapReport) -> set[str]:
    return {str(cause.name) for cause in report.causes}


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2, 0.0])
def test_the_share_is_that_of_the_update(share: float) -> None:
    """The estimate is near the truth, and in 18 of 20 data sets its interval holds it."""
    found = [estimated(updated(share, seed=seed)).share for seed in range(20)]

    assert share == pytest.approx(np.mean([item.value for item in found]), abs=0.03)
    assert 18 <= sum(item.low <= share <= item.high for item in found)


@pytest.mark.parametrize("share", [0.6, 0.2])
def test_tags_are_pooled(share: float) -> None:
    """With scores under each version, all tags together give one share: a tag alone has too few
    sequences for it.
    """
    world = GapWorld(sequences=30, length=150)
    columns = gap_columns(f"update arrived by {share * 100:.0f} %", seed=3, world=world)
    arrival = estimated(columns)
    one = np.asarray(columns["version"]) == 2
    alone = estimated({**columns, "mask": one})

    assert (30, 10) == (arrival.sequences, alone.sequences)
    assert arrival.share.low <= share <= arrival.share.high
    assert arrival.share.high - arrival.share.low < alone.share.high - alone.share.low


def test_numerics_of_the_trainer_do_not_flatten_the_share() -> None:
    """Noise of the trainer's two scores, as large as the update: a slope of single tokens would be
    half of it; the tokens of a sequence move together, and noise does not.
    """
    columns = updated(1.0, scoring=0.15, seed=2, sequences=120)
    update = columns["trainer_logprob"] - columns["previous_logprob"]
    middle = (columns["trainer_logprob"] + columns["previous_logprob"]) / 2
    plain = 0.5 + np.polyfit(update, columns["rollout_logprob"] - middle, 1)[0]
    arrival = estimated(columns)

    assert plain < 0.85
    assert arrival.share.low <= 1.0 <= arrival.share.high
    assert 0.9 < arrival.share.value


def test_an_update_below_the_numerics_tells_nothing() -> None:
    """The interval says so, the text too, and no cause is named."""
    report = measured(updated(0.0, step=0.002, scoring=0.1))

    assert not report.arrivals[0].known
    assert (
        "share of the weight update that arrived: cannot be told from 60 sequences, for numerics"
        in text_of(gap_lines(report))
    )
    assert {"numerics only"} == named(report)


def test_a_share_is_printed_and_in_the_json() -> None:
    """Of a healthy run too: all of the update arrived, and nothing is named."""
    report = measured(updated(1.0))
    arrival = report.to_dict()["arrival"][0]

    assert {"numerics only"} == named(report)
    assert (
        f"share of the weight update that arrived: {report.arrivals[0].share.value:.2f} ["
        in text_of(gap_lines(report))
    )
    assert (None, 60, 7200) == (arrival["part"], arrival["sequences"], arrival["tokens"])
    assert 1.0 == pytest.approx(arrival["share"][0], abs=0.1)


@pytest.mark.parametrize(
    ("share", "name", "because"),
    [
        (0.5, "partly arrived weights", "0.5"),
        (0.0, "stale engine weights", ""),
    ],
)
def test_one_replica_is_named(share: float, name: str, because: str) -> None:
    """The replica whose update is missing, in part or as a whole, and no other."""
    replica = np.arange(90) % 3
    columns = updated(np.where(replica == 2, share, 1.0), sequences=90)
    report = measured(columns, replica=np.repeat(replica, LENGTH))

    (cause,) = [cause for cause in report.causes if cause.name == name]
    arrived = "the share of the update from the previous weights to the tagged ones that arrived is"
    assert cause.because.startswith(f"{arrived} at replica 2 alone {because}")
    assert ["", "replica 0", "replica 1", "replica 2"] == [item.label for item in report.arrivals]
    assert "stale replica" not in named(report)


def test_a_group_of_the_user_is_named() -> None:
    """Any label that is compared is also estimated by itself."""
    adapter = np.where(np.arange(90) % 2, "lora", "base")
    columns = updated(np.where(adapter == "lora", 0.0, 1.0), sequences=90)
    report = measured(columns, groups={"adapter": np.repeat(adapter, LENGTH)})

    (cause,) = [cause for cause in report.causes if cause.name == "stale engine weights"]
    assert " that arrived is at adapter lora alone " in cause.because
    assert "one group differs" not in named(report)


def test_old_weights_in_half_of_the_sequences_are_no_half_update() -> None:
    """One share for all fits worse than old or new weights for each sequence."""
    arrival = estimated(updated(np.arange(60) % 2))

    assert arrival.mixture is not None and arrival.mixture.sure
    assert (30, 30) == pytest.approx((arrival.mixture.old, arrival.mixture.new), abs=2)
    half = estimated(updated(0.5))
    assert half.mixture is None or not half.mixture.sure


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.2])
def test_another_temperature_is_no_missing_share(temperature: float) -> None:
    """Raw logprobs at another temperature scale the update as well, and it arrived."""
    columns = gap_columns("update arrived by 60 %, one column", seed=5)
    scaled = gap_columns(f"raw logprobs, T={temperature}", seed=5)
    # the update of the first, around the logprobs of the second
    update = columns["trainer_logprob"] - columns["previous_logprob"]
    previous = np.minimum(scaled["trainer_logprob"] - update, 0.0)

    assert set() == ARRIVAL & named(measured({**scaled, "previous_logprob": previous}))


def scores_before(columns: dict[str, np.ndarray]) -> np.ndarray:
    """The trainer's logprobs under the previous weights, for 60 sequences of 120 tokens."""
    rng = np.random.default_rng(0)
    update = 0.2 * (rng.standard_normal((60, 1)) + rng.standard_normal((60, 120))).ravel()
    update *= 1 - np.exp(columns["trainer_logprob"])
    return np.minimum(columns["trainer_logprob"] - update, 0.0)


@pytest.mark.parametrize("fault", ["lost weights", "samples swapped", "off by one, late"])
def test_scores_of_another_text_are_no_half_update(fault: str) -> None:
    """Logprobs that have nothing to do with the scores lie between any two: that is no share."""
    world = GapWorld(sequences=60, length=120)
    columns = gap_columns(fault, seed=2, world=world)

    assert set() == ARRIVAL & named(
        measured({**columns, "previous_logprob": scores_before(columns)})
    )


@pytest.mark.parametrize("fault", ["packed without a block mask", "top-p 0.90", "end token forced"])
def test_other_faults_leave_the_share_at_one(fault: str) -> None:
    """What is wrong with both scores alike does not look like a missing update."""
    world = GapWorld(sequences=60, length=120)
    columns = gap_columns(fault, seed=2, world=world)
    report = measured({**columns, "previous_logprob": scores_before(columns)})

    assert set() == ARRIVAL & named(report)


def test_a_heavy_token_decides_nothing() -> None:
    """One token with |d| = 40, and one whose score the update changed by 30."""
    columns = updated(1.0)
    before = estimated(columns).share.value
    columns["rollout_logprob"][7] -= 40
    columns["previous_logprob"][4000] -= 30

    assert before == pytest.approx(estimated(columns).share.value, abs=0.02)


def test_healthy_updates_are_never_called_late() -> None:
    """Of 30 runs with large and small updates, quiet and noisy trainers, none is called late."""
    for seed in range(30):
        step, scoring = (0.05, 0.15, 0.3)[seed % 3], (0.0, 0.1)[seed % 2]
        columns = updated(1.0, seed=seed, step=step, scoring=scoring, sequences=40)
        replica = np.repeat(np.arange(40) % 2, LENGTH)
        assert set() == ARRIVAL & named(measured(columns, replica=replica)), seed


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"version": np.full(SEQUENCES * LENGTH, "step-2")},
        {"previous_logprob": np.full(SEQUENCES * LENGTH, np.nan)},
    ],
)
def test_without_the_previous_weights_there_is_no_share(columns: dict[str, Any]) -> None:
    """No score under older weights, versions without an order, or no token with such a score."""
    healthy = updated(1.0)
    previous = healthy.pop("previous_logprob")
    if "version" in columns:
        columns = columns | {
            "by_version": {"step-1": previous, "step-2": healthy["trainer_logprob"]}
        }
    report = measured({**healthy, **columns})

    assert () == report.arrivals
    assert "arrived" not in text_of(gap_lines(report))


def test_an_update_that_changed_nothing_has_no_share() -> None:
    """Equal scores under both weights move no token."""
    columns = updated(1.0)
    same = columns["trainer_logprob"]

    assert () == measure_arrivals(TokenPairs.of(**{**columns, "previous_logprob": same}))


def test_the_parts_that_lack_most_are_printed() -> None:
    """Of many replicas four are printed, the one that lacks most first; the others are counted."""
    replica = np.arange(120) % 6
    report = measured(
        updated(np.where(replica == 4, 0.0, 1.0), sequences=120),
        replica=np.repeat(replica, LENGTH),
    )
    lines = [line for line in text_of(gap_lines(report)).splitlines() if "  share of the" in line]

    assert 5 == len(lines)
    assert " at replica 4: " in lines[1]
    assert "  2 further parts with larger or unknown shares: --json has them" in text_of(
        gap_lines(report)
    )
