"""A trainer of the user's own in the gap's matrix: ``--rollproof-trainer module:factory``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rollproof.core.records import Rollout
from rollproof.errors import GapError, UsageError
from rollproof.gap.scored_rollouts import Scored
from rollproof.gpu_suites.gap.engine_rollouts import units_of
from rollproof.gpu_suites.gap.gap_matrix import CONTROLS, Routed, measure_cell
from rollproof.gpu_suites.gap.scorers import UserScorer
from tests.gpu_suites.test_gap_matrix import sampled

SPEC = "tests.gpu_suites.test_user_trainer:Own"


class Own:
    """Scores as the engine did, less 0.3 for each token whose row is not the engine's; natively
    every fifth is not.
    """

    known: ClassVar[dict[tuple[int, ...], tuple[Any, Any]]] = {}
    returns_routes: ClassVar[bool] = True

    def __init__(self, checkpoints: Mapping[str, Path]) -> None:
        assert {"A", "B"} == set(checkpoints)

    def score(self, rollouts: Sequence[Rollout], *, version: str, replay: bool) -> list[Any]:
        return [self._scored(one, replay) for one in rollouts]

    def _scored(self, rollout: Rollout, replay: bool) -> Any:
        logprobs, routes = self.known[rollout.prompt_ids + rollout.response_ids]
        used = routes.copy()
        used[::5] = (used[::5] + 1) % 8
        if replay:
            assert rollout.routes is not None
            used = rollout.routes[len(rollout.prompt_ids) - 1 :]
        wrong = (np.sort(used) != np.sort(routes)).any(axis=(1, 2))
        own = logprobs - 0.3 * wrong - 0.01 * np.arange(len(wrong)) % 3
        return Scored(logprobs=own, routes=used) if self.returns_routes else own


class Short(Own):
    def _scored(self, rollout: Rollout, replay: bool) -> Any:
        return np.zeros(3)


class Forgetful(Own):
    def score(self, rollouts: Sequence[Rollout], *, version: str, replay: bool) -> list[Any]:
        return super().score(rollouts, version=version, replay=replay)[1:]


def no_trainer(checkpoints: Mapping[str, Path]) -> str:
    return "not a trainer"


CHECKPOINTS = {"A": Path("a"), "B": Path("b")}


@pytest.fixture
def samples() -> Any:
    """What a fake engine sampled, known to the trainer."""
    found = sampled()
    for one in found:
        (unit,) = units_of([one])
        Own.known[unit.ids] = (
            one.logprobs,
            unit.routes[unit.start - 1 : unit.end - 1].astype(np.int64),
        )
    return found


@pytest.mark.parametrize("tells", [True, False])
def test_it_is_measured_as_the_others_are(
    samples: Any, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay lowers the gap and wrong routes raise it; what its routers did is compared where it
    tells; nothing of it is replayed.
    """
    monkeypatch.setattr(Own, "returns_routes", tells)
    cell = measure_cell("fake", samples, UserScorer(SPEC, CHECKPOINTS, "bfloat16"))
    assert {Routed.NATIVE, Routed.R3, *CONTROLS} == set(cell.reports)
    assert (True, True, None, SPEC) == (
        cell.helps,
        cell.controls_harm,
        cell.self_replay,
        cell.trainer,
    )
    metrics = cell.to_dict()["reports"]["native"]["metrics"]
    assert tells == ("slot_mismatch" in metrics)
    if tells:
        assert metrics["slot_mismatch"]["value"] > 0


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (
            "tests.gpu_suites.test_user_trainer:no_trainer",
            UsageError,
            "makes a str, which has no score",
        ),
        ("tests.gpu_suites.test_user_trainer:Nobody", UsageError, "has no 'Nobody'"),
        (
            "tests.gpu_suites.test_user_trainer:Short",
            GapError,
            r"logprobs have the shape \(3,\) for 20 tokens",
        ),
        (
            "tests.gpu_suites.test_user_trainer:Forgetful",
            GapError,
            "returned 23 scores for 24 rollouts under version A",
        ),
    ],
)
def test_what_is_no_trainer(samples: Any, spec: str, error: type[Exception], words: str) -> None:
    """Misuse is told when it shows."""
    with pytest.raises(error, match=words):
        measure_cell("fake", samples, UserScorer(spec, CHECKPOINTS, "bfloat16"))
