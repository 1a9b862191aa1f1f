"""Faults of a part of the tokens: some sequences, their last third, one layer, a share of the
replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollproof.gap import GapVerdict, measure
from rollproof.gap.diagnosis.causes import Cause
from tests.support.gap_faults import GapWorld, gap_columns
from tests.support.measured_gap import sampled

WORLD = GapWorld(sequences=60, length=120)
SHAPE = (60, 120, 6, 4)
Change = Callable[[Any], Any]


def the_cause(columns: dict[str, Any]) -> Cause:
    """The only cause that is told; it is wrong at any size, and fails the gap."""
    report = measure(**columns, resamples=100)
    (cause,) = report.causes
    assert GapVerdict.FAIL is report.verdict
    return cause


def moved(part: Any, *, seed: int = 3) -> dict[str, Any]:
    """A healthy gap whose trainer logprobs stand one place late in ``part`` of ``(sequences,
    tokens)``.
    """
    columns = gap_columns("numerics only", seed=seed, world=WORLD)
    own = columns["trainer_logprob"].reshape(SHAPE[:2]).copy()
    late = np.roll(own, 1, axis=1)
    own[part] = late[part]
    return {**columns, "trainer_logprob": own.ravel()}


def rerouted(change: Change, *, seed: int = 4) -> dict[str, Any]:
    """A healthy gap whose trainer routes ``(sequences, tokens, layers, top_k)`` were changed."""
    columns = gap_columns("numerics only", seed=seed, world=WORLD)
    routes = change(columns["trainer_routes"].reshape(SHAPE).copy())
    return {**columns, "trainer_routes": routes.reshape(-1, *SHAPE[2:])}


@pytest.mark.parametrize(
    ("part", "where"),
    [
        (np.s_[:6], "in 6 of 60 sequences, mean"),
        (np.s_[:2], "in 2 of 60 sequences, mean"),
        (np.s_[::2], "in 30 of 60 sequences, mean"),
        (np.s_[:, 80:], "in the last third of 60 of 60 sequences"),
        (np.s_[:9, 80:], "in the last third of 9 of 60 sequences"),
        (np.s_[40:], "in 20 of 60 sequences, mean"),
    ],
)
def test_an_off_by_one_of_a_part_is_named_and_placed(part: Any, where: str) -> None:
    """Logprobs a place late in some sequences, or at their ends, are an off by one there: no
    temperature, nothing unexplained.
    """
    cause = the_cause(moved(part))
    assert "off by one" == cause.name
    assert where in cause.because


def swapped(routes: Any) -> Any:
    routes[:, :, [1, 4]] = routes[:, :, [4, 1]]
    return routes


def later(part: Any) -> Change:
    """Rows of ``part`` taken from the token before."""

    def change(routes: Any) -> Any:
        routes[part] = np.roll(routes, 1, axis=1)[part]
        return routes

    return change


def next_layer(routes: Any) -> Any:
    routes[:8] = np.roll(routes[:8], 1, axis=2)
    return routes


@pytest.mark.parametrize(
    ("change", "name", "where"),
    [
        (
            later(np.s_[:, :, 3]),
            "routes shifted by a token",
            r"in layer 3 alone: \d+% of the expert slots .* 1 token further on",
        ),
        (later(np.s_[:, :, 2:4]), "routes shifted by a token", "in layers 2, 3: "),
        (later(np.s_[:6]), "routes shifted by a token", "in 6 of 60 sequences: "),
        (
            later(np.s_[:, 80:]),
            "routes shifted by a token",
            "in the last third of 60 of 60 sequences: ",
        ),
        (swapped, "routes shifted by a layer", r"layer 1 those of 4, 4 those of 1\)"),
        (next_layer, "routes shifted by a layer", "in 8 of 60 sequences: .* 1 layer further on"),
    ],
)
def test_routes_shifted_in_a_part_are_named_and_placed(
    change: Change, name: str, where: str
) -> None:
    """A shift of one layer, of some sequences or of their ends names the layer and the shift; it is
    no polluted capture.
    """
    cause = the_cause(rerouted(change))
    assert name == cause.name
    assert re.search(where, cause.because), cause.because


def dense(part: Any) -> Change:
    """Rows of ``part`` with a dense first layer that was not skipped."""

    def change(routes: Any) -> Any:
        wrong = np.roll(routes, 1, axis=2)
        wrong[:, :, 0] = 0
        routes[part] = wrong[part]
        return routes

    return change


def by_layer(part: Any) -> Change:
    def change(routes: Any) -> Any:
        routes[part] = np.roll(routes, 1, axis=2)[part]
        return routes

    return change


HERE_AND_THERE = {
    "the first tokens": np.s_[:, :25],
    "the last tokens": np.s_[:, 115:],
    "behind resumes": np.s_[:, [40, 41, 42, 80, 81, 82]],
}


@pytest.mark.parametrize("part", HERE_AND_THERE.values(), ids=HERE_AND_THERE)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (later, "routes shifted by a token"),
        (by_layer, "routes shifted by a layer"),
        (dense, "routes shifted by dense layers"),
    ],
)
def test_routes_shifted_here_and_there_are_no_pollution(
    change: Callable[[Any], Change], name: str, part: Any
) -> None:
    """Of tokens that make no block, rows that agree no better than chance are tried at other places
    before a stranger is blamed.
    """
    cause = the_cause(rerouted(change(part)))
    assert name == cause.name
    assert re.search(
        r"at [\d,]+ tokens of 60 sequences: \d+% of the expert slots differ, and \d", cause.because
    ), cause.because


@pytest.mark.parametrize("part", [np.s_[:1], np.s_[:6], np.s_[:, 80:]])
def test_a_dense_layer_that_some_rows_have_is_named(part: Any) -> None:
    """Where leading layers hold no selection in a part of the sequences alone, it is a dense layer,
    not a layer shift.
    """
    cause = the_cause(rerouted(dense(part)))
    assert "routes shifted by dense layers" == cause.name
    assert "the first 1 layer of one side hold no selection there" in cause.because


def test_one_polluted_sequence_of_many_is_seen() -> None:
    """Less than a hundredth of the tokens, but all of one sequence."""
    world = GapWorld(sequences=150, length=40)
    columns = gap_columns("numerics only", seed=1, world=world)
    routes = columns["trainer_routes"].copy()
    routes[400:440] = np.argsort(np.random.default_rng(0).random((40, 6, 32)), axis=2)[:, :, :4]
    cause = the_cause({**columns, "trainer_routes": routes})
    assert "polluted capture" == cause.name
    assert "(all of 1 sequence)" in cause.because


@pytest.mark.parametrize(
    ("alone", "where"), [(False, "; before a resume alone"), (True, "; after a resume alone")]
)
def test_a_version_that_is_wrong_on_one_side_of_a_resume(alone: bool, where: str) -> None:
    """A sample with one tag for all its segments: the tokens of the other segments are of another
    version, and it is said which.
    """
    rng = np.random.default_rng(0)
    rollout = sampled(rng, 60 * 120).reshape(60, 120)
    place = np.arange(120)
    noise, drift = (
        (0.03 * size * (1 - np.exp(rollout)) * rng.standard_normal(rollout.shape))
        for size in (1, 4)
    )
    wrong = (place >= 60) if alone else (place < 60)
    scores = {
        version: np.minimum(rollout + noise + drift * ((version == 4) == wrong), 0).ravel()
        for version in (4, 3)
    }
    report = measure(
        rollout.ravel(),
        scores[4],
        sequence_id=np.repeat(np.arange(60), 120),
        mask=np.ones(7200),
        version=np.full(7200, 4),
        by_version=scores,
        since_resume=np.tile(np.where(place < 60, -1, place - 60), 60),
        resamples=100,
    )
    (cause,) = [item for item in report.causes if item.name == "wrong version scored"]
    assert f"(tag 4: version 3{where})" in cause.because


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("top-p 0.90", "truncated support (top-p or top-k)"),
        ("raw logprobs, T=0.6", "temperature or logprob mode"),
        ("lost weights", "unrelated weights"),
        ("stale replica", "stale replica"),
    ],
)
def test_what_one_replica_does_is_named_by_its_own_tokens(fault: str, name: str) -> None:
    """A replica that samples from another law is told by that law's sign; weights that are a little
    older show none, and stay stale.
    """
    world = GapWorld(sequences=64, length=300)
    healthy, wrong = (
        gap_columns(item, seed=seed, world=world)
        for item, seed in (("numerics only", 1), (fault, 2))
    )
    own = np.repeat(np.arange(64) % 4 == 2, 300)
    columns = {
        side: np.where(own, wrong[side], healthy[side])
        for side in ("rollout_logprob", "trainer_logprob")
    }
    report = measure(
        **columns,
        sequence_id=healthy["sequence_id"],
        mask=healthy["mask"],
        replica=np.repeat(np.arange(64) % 4, 300),
        resamples=100,
    )
    (cause,) = report.causes
    assert name == cause.name
    assert "replica 2" in cause.because


def test_polluted_rows_are_no_shift() -> None:
    """Rows of strangers, in whole sequences or here and there, fit no other place."""
    rng = np.random.default_rng(0)

    def strangers(part: Any) -> Change:
        def change(routes: Any) -> Any:
            noise = np.argsort(rng.random((*routes.shape[:3], 32)), axis=3)[..., :4]
            routes[part] = noise[part]
            return routes

        return change

    for part in (np.s_[:8], rng.random(SHAPE[:2]) < 0.2, np.s_[:, 100:]):
        assert "polluted capture" == the_cause(rerouted(strangers(part))).name


def test_rows_that_hold_no_capture_make_no_warning() -> None:
    """Sequences whose rows were not captured at all (filled with -1) are left out: no warning, and
    no cause.
    """

    def emptied(routes: Any) -> Any:
        routes[:20] = -1
        return routes

    report = measure(**rerouted(emptied), resamples=100)
    assert ["numerics only"] == [cause.name for cause in report.causes]


@pytest.mark.parametrize("seed", range(4))
def test_healthy_resumes_at_uncertain_tokens_are_no_fault(seed: int) -> None:
    """Aborts that fall onto uncertain tokens leave larger differences behind them, which such
    tokens have anywhere.
    """
    rng = np.random.default_rng(seed)
    rollout = sampled(rng, 24_000).reshape(60, 400)
    noise = 0.1 * (1 - np.exp(rollout)) * rng.standard_normal(rollout.shape)
    trainer = np.minimum(rollout + noise, 0)
    worst = np.argmin(rollout[:, 100:300], axis=1) + 100
    since = np.arange(400) - worst[:, None]
    report = measure(
        rollout.ravel(),
        trainer.ravel(),
        sequence_id=np.arange(24_000) // 400,
        mask=np.ones(24_000),
        resamples=200,
        since_resume=np.where(since < 0, -1, since).ravel(),
    )
    near, away = (
        next(item for item in report.buckets["since_resume"] if item.label == label)
        for label in ("0", "8+")
    )
    assert near.abs_diff.low > 2 * away.abs_diff.high
    assert ["numerics only"] == [cause.name for cause in report.causes]
    assert GapVerdict.FAIL is not report.verdict


def test_a_fault_at_resumes_shows_where_the_rest_is_exact() -> None:
    """Two sides that agree to the bit but behind a resume have that cause, and no division by
    nothing.
    """
    rollout = sampled(np.random.default_rng(1), 6000)
    since = np.arange(6000) % 100 - 40
    trainer = rollout - np.where(np.isin(since, (0, 1)), 0.3, 0.0)
    report = measure(
        rollout,
        trainer,
        sequence_id=np.arange(6000) // 100,
        mask=np.ones(6000),
        since_resume=np.maximum(since, -1),
        resamples=100,
    )
    assert ["resume boundary"] == [cause.name for cause in report.causes]


@pytest.mark.parametrize("alone", [True, False])
def test_one_stale_replica_of_twenty(alone: bool) -> None:
    """A stale replica with six sequences is named though replicas with fewer stand beside it; those
    are told in a note.
    """
    rng = np.random.default_rng(2)
    rollout = sampled(rng, 110 * 60).reshape(110, 60)
    replica = np.concatenate([np.arange(108) % 18, [18, 19]]) if not alone else np.arange(110) % 18
    noise = (
        np.where(replica == 7, 0.3, 0.02)[:, None]
        * (1 - np.exp(rollout))
        * rng.standard_normal(rollout.shape)
    )
    noise[replica >= 18] *= 50
    report = measure(
        rollout.ravel(),
        np.minimum(rollout + noise, 0).ravel(),
        sequence_id=np.arange(6600) // 60,
        mask=np.ones(6600),
        resamples=100,
        replica=np.repeat(replica, 60),
    )
    (cause,) = [item for item in report.causes if item.name == "stale replica"]
    assert "sequences of replica 7 have" in cause.because
    replica_notes = [note for note in report.notes if "replica" in note]
    assert (
        []
        if alone
        else [
            "2 replicas sampled fewer than 5 sequences (18, 19): too few to detect a stale replica."
        ]
    ) == replica_notes
