"""Staleness and the engine's mismatch told apart, where tokens have a logprob under the current
weights too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.training import Score
from rollproof.gap import gap_lines, measure
from rollproof.gap.html.page import page_text
from rollproof.gap.scored_rollouts import join_trace
from rollproof.reporting.text import text_of
from rollproof.store import dump_trace
from tests.support.resumed_trace import resumed


def columns(
    engine: float, policy: float, seed: int = 0, sequences: int = 60, length: int = 100
) -> dict[str, Any]:
    """Tokens of versions 0 to 2: an engine's noise of one size, and a change of the policy that
    grows with their age.
    """
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, sequences * length) - 0.5
    version = np.arange(rollout.size) // length % 3
    trainer = rollout + engine * rng.standard_normal(rollout.size)
    current = trainer + policy * (2 - version) * rng.standard_normal(rollout.size)
    return {
        "rollout_logprob": rollout,
        "trainer_logprob": np.minimum(trainer, 0),
        "current_logprob": np.minimum(current, 0),
        "sequence_id": np.arange(rollout.size) // length,
        "mask": np.ones(rollout.size),
        "version": version,
        "current_version": np.full(rollout.size, 2),
    }


def test_parts_add_up_token_by_token() -> None:
    """The parts of a token add up to its difference to the current weights, and so do their k1."""
    own = columns(0.02, 0.05)
    found = measure(**own, resamples=100).decomposition
    assert found is not None
    np.testing.assert_allclose(
        found.engine + found.policy, own["current_logprob"] - own["rollout_logprob"], atol=1e-12
    )
    everything = found.rows[0]
    assert everything.total["k1"].value == pytest.approx(
        everything.engine["k1"].value + everything.policy["k1"].value, abs=1e-12
    )


def test_shares_are_those_that_were_planted() -> None:
    """The engine's share is 1 for the current version and falls with age, as the sizes of the
    noises say, within its interval.
    """
    found = measure(**columns(0.02, 0.05), resamples=200).decomposition
    assert found is not None
    assert ["all", "0", "1", "2"] == [row.label for row in found.rows]
    assert (1.0, 0.0) == (found.rows[1].share.value, found.rows[1].policy["abs_diff_mean"].value)
    for row, age in zip(found.rows[2:], (1, 2), strict=True):
        expected = 0.02 / (0.02 + 0.05 * age)
        assert row.share.low <= expected <= row.share.high
        assert row.share.high - row.share.low < 0.06


def test_an_engines_fault_and_an_old_policy_look_different() -> None:
    """The same total is the engine's in the one case, and the policy's in the other."""
    engine, policy = (
        measure(**columns(*sizes), resamples=100).decomposition
        for sizes in ((0.1, 0.001), (0.001, 0.1))
    )
    assert engine is not None and policy is not None
    assert engine.rows[0].share.low > 0.9
    assert policy.rows[0].share.high < 0.1


def test_every_door_tells_the_parts() -> None:
    """Terminal, JSON and page hold the rows; without current logprobs there are none, and tokens
    that are not finite are left out.
    """
    own = columns(0.02, 0.05)
    own["current_logprob"][:7] = np.nan
    report = measure(**own, resamples=100)
    assert "age of the weights" in text_of(gap_lines(report))
    assert max(map(len, text_of(gap_lines(report)).splitlines())) <= 120
    assert [5993, 1993] == [
        row["tokens"] for row in report.to_dict()["decomposition"] if row["age"] in ("all", "2")
    ]
    pytest.importorskip("matplotlib", reason="the page needs rollproof[report]")
    assert "Engine or staleness" in page_text(report)
    del own["current_logprob"]
    assert measure(**own, resamples=100).decomposition is None
    assert [] == measure(**own, resamples=100).to_dict()["decomposition"]


def test_scores_of_a_trace_are_parted(tmp_path: Path) -> None:
    """Of scores under several versions in a trace the newest are those of the current weights."""
    scores = [
        Score(request_id="r0", version=version, scorer="fsdp", logprobs=np.full(4, -float(version)))
        for version in (1, 2, 5)
    ]
    dump_trace(resumed(*scores), tmp_path / "trace.json")
    sides = join_trace(tmp_path / "trace.json", "score:fsdp").columns
    assert [-5.0] * 4 == sides["current_logprob"].tolist()
    assert [5] * 4 == sides["current_version"].tolist()
