"""Faults of places: the last token of each sequence, packed rows, and parts that agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.gap import GapReport, GapVerdict, measure
from rollproof.gap.diagnosis.agreeing_parts import agreeing_parts
from rollproof.gap.diagnosis.causes import Cause
from tests.support.gap_faults import GapWorld, gap_columns
from tests.support.measured_gap import sampled

SEQUENCES, LENGTH = 60, 90
SHAPE = (SEQUENCES, LENGTH)
END = "end token without a logprob"
PACKING = "packed sequences see each other"


def healthy(seed: int = 0, noise: Any = 0.05) -> tuple[Any, Any]:
    """Logprobs of rollout and trainer, ``(sequences, tokens)``, that differ by ``noise``."""
    rng = np.random.default_rng(seed)
    rollout = sampled(rng, SEQUENCES * LENGTH).reshape(SHAPE)
    trainer = rollout + noise * (1 - np.exp(rollout)) * rng.standard_normal(SHAPE)
    return rollout, np.minimum(trainer, 0.0)


def measured(rollout: Any, trainer: Any, **columns: Any) -> GapReport:
    return measure(
        rollout.ravel(),
        trainer.ravel(),
        sequence_id=np.repeat(np.arange(SEQUENCES), LENGTH),
        mask=np.ones(rollout.size),
        **columns,
        resamples=100,
    )


def causes(report: GapReport) -> dict[str, Cause]:
    return {str(cause.name): cause for cause in report.causes}


def uncertain_end(rollout: Any, trainer: Any) -> None:
    """Let both sides give the last tokens a logprob of about -1."""
    rng = np.random.default_rng(9)
    rollout[:, -1] = -rng.uniform(0.5, 2.0, SEQUENCES)
    trainer[:, -1] = rollout[:, -1] + 0.02 * rng.standard_normal(SEQUENCES)


@pytest.mark.parametrize("some", [np.s_[:], np.s_[::2], np.s_[:12]])
def test_an_end_without_a_logprob_is_named(some: Any) -> None:
    """Exact zeros at the ends of all sequences, or of those that were not cut: the gap fails."""
    rollout, trainer = healthy()
    uncertain_end(rollout, trainer)
    rollout[some, -1] = 0.0
    report = measured(rollout, trainer)
    cause = causes(report)[END]

    assert cause.because.startswith("of 60 last tokens that the trainer is not certain of (logprob")
    assert f"{len(rollout[some])} have a rollout logprob of exactly 0; of other" in cause.because
    assert "give it mask 0" in cause.advice
    assert GapVerdict.FAIL is report.verdict


def test_an_end_that_the_trainer_did_not_score_is_named() -> None:
    """The same on the other side, with the advice for that side."""
    rollout, trainer = healthy()
    uncertain_end(rollout, trainer)
    trainer[:, -1] = 0.0
    cause = causes(measured(rollout, trainer))[END]

    assert "60 have a trainer logprob of exactly 0" in cause.because
    assert cause.advice.startswith("The trainer's logprobs end one token early")


def test_zeros_with_another_cause_are_no_end() -> None:
    """Padding with mask 1, logprobs that a coarse dtype rounds to 0 anywhere, ends that both sides
    are certain of, and zeros at a handful of ends.
    """
    rollout, trainer = healthy()
    uncertain_end(rollout, trainer)
    padded, rounded, sure, few = (rollout.copy() for _ in range(4))
    padded[:, -20:] = 0.0
    trainer_of_padding = trainer.copy()
    trainer_of_padding[:, -20:] = -1.0
    # the ends are as likely as many other tokens that are rounded too
    trainer_sure = trainer.copy()
    trainer_sure[:, -1] = -np.random.default_rng(1).uniform(0.011, 0.1, SEQUENCES)
    rounded[trainer_sure > -0.1] = 0.0
    sure[:, -1] = 0.0
    certain = trainer.copy()
    certain[:, -1] = -1e-3
    few[:5, -1] = 0.0
    reports = {
        "padding": measured(padded, trainer_of_padding),
        "dtype": measured(rounded, trainer_sure),
        "certain": measured(sure, certain),
        "few": measured(few, trainer),
    }

    assert {} == {name: 1 for name, report in reports.items() if END in causes(report)}
    assert any("as padding has" in note for note in reports["padding"].notes)


def packed(leak: Any, seed: int = 0) -> GapReport:
    """Rows of three sequences each; ``leak`` ``(sequences, tokens)`` is the noise of the trainer
    beside numerics.
    """
    rng = np.random.default_rng(seed + 50)
    rollout, trainer = healthy(seed)
    trainer = trainer + leak * (1 - np.exp(rollout)) * rng.standard_normal(SHAPE)
    return measured(
        rollout,
        np.minimum(trainer, 0.0),
        pack_index=np.repeat(np.arange(SEQUENCES) % 3, LENGTH),
    )


LATER = (np.arange(SEQUENCES) % 3 > 0)[:, None]
FADING = np.exp(-np.arange(LENGTH) / 20)[None]


def test_a_pack_without_a_mask_is_named() -> None:
    """Sequences after the first of a row differ at their starts; the first ones agree."""
    report = packed(0.5 * LATER * FADING)
    cause = causes(report)[PACKING]

    assert cause.because.startswith(
        "20 sequences that come first in their packed row agree; the 40 after them differ "
    )
    assert "cu_seqlens" in cause.advice
    assert GapVerdict.FAIL is report.verdict


@pytest.mark.parametrize(
    "leak",
    [
        pytest.param(np.zeros(SHAPE), id="healthy"),
        pytest.param(0.5 * np.ones((SEQUENCES, 1)) * FADING, id="all starts"),
        pytest.param(0.2 * LATER * np.ones(SHAPE), id="later sequences, everywhere"),
        pytest.param(0.5 * LATER * FADING[:, ::-1], id="later sequences, at their ends"),
        pytest.param(0.5 * ~LATER * FADING, id="first sequences"),
    ],
)
def test_other_differences_in_packs_are_no_leak(leak: Any) -> None:
    """Differences of all starts, or that do not fade, or of the first sequences."""
    for seed in range(3):
        assert PACKING not in causes(packed(leak, seed))


def test_hard_starts_of_later_sequences_are_no_leak() -> None:
    """Uncertain tokens differ more, wherever they stand."""
    rollout, trainer = healthy(noise=0.1)
    order = np.argsort(rollout, axis=1)
    later = np.flatnonzero(LATER[:, 0])
    for side in (rollout, trainer):
        side[later] = np.take_along_axis(side, order, axis=1)[later]
    report = measured(rollout, trainer, pack_index=np.repeat(np.arange(SEQUENCES) % 3, LENGTH))

    assert PACKING not in causes(report)


def test_logprobs_of_other_weights_are_unrelated() -> None:
    """No part agrees, and it is said so."""
    columns = gap_columns("lost weights", seed=1, world=GapWorld(sequences=60, length=90))
    cause = causes(measure(**columns, resamples=100))["unrelated weights"]

    assert cause.because.endswith("no shift of tokens mends it, and no part of the tokens agrees")


def _lost(lost: Any, **columns: Any) -> GapReport:
    """Where ``lost`` ``(sequences, tokens)`` holds, the trainer's logprobs are of other tokens."""
    rng = np.random.default_rng(3)
    rollout, trainer = healthy(3)
    other = rng.permutation(trainer.ravel()).reshape(SHAPE)
    return measured(rollout, np.where(lost, other, trainer), **columns)


SOURCE = np.where(np.arange(SEQUENCES) % 4, "web", "code")


@pytest.mark.parametrize(
    ("lost", "agreeing", "columns"),
    [
        (
            np.broadcast_to(np.arange(SEQUENCES)[:, None] % 5 > 0, SHAPE),
            "12 of 60 sequences agree",
            {},
        ),
        (
            np.broadcast_to(SOURCE[:, None] == "web", SHAPE),
            "in source web alone: k3 = ",
            {"groups": {"source": np.repeat(SOURCE, LENGTH)}},
        ),
        (
            np.broadcast_to(LATER, SHAPE),
            "the first sequence of each packed row agrees",
            {"pack_index": np.repeat(np.arange(SEQUENCES) % 3, LENGTH)},
        ),
    ],
)
def test_where_a_part_agrees_the_weights_are_not_lost(
    lost: Any, agreeing: str, columns: dict[str, Any]
) -> None:
    """A part that agrees shows that both sides have the weights; it is named."""
    found = causes(_lost(lost, **columns))

    assert "unrelated weights" not in found
    assert "temperature or logprob mode" not in found
    assert agreeing in found["a part is unrelated"].because


def test_the_start_of_the_sequences_may_agree() -> None:
    """A context that goes wrong from some token on spares the tokens before it."""
    lost = np.broadcast_to(np.arange(LENGTH) >= LENGTH // 3, SHAPE)

    assert "the first third of the sequences agrees" == agreeing_parts(_lost(lost).pairs)
    assert "" == agreeing_parts(_lost(np.ones(SHAPE, bool)).pairs)
