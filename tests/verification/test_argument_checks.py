"""Functions that judge one kind of subject refuse wrong arguments, all in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollproof.errors import UsageError
from rollproof.fakes.trainers.reference_batches import Collator
from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.verification.batches import judge_batches
from rollproof.verification.layouts import judge_layouts
from rollproof.verification.replay import judge_replay

JUDGES = [(judge_batches, Collator), (judge_layouts, MegatronLike), (judge_replay, ReplayTrainer)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "3"}, "seed='3' must be an integer >= 0"),
        ({"seed": -1}, "seed=-1 must be an integer >= 0"),
        ({"only": 3}, "only must be a list of names"),
        ({"only": "batch"}, "only='batch' is"),
        ({"name": 5}, "name must be"),
        ({"expected": ["routes.rows"]}, "expected must map ids of checks to reasons"),
        ({"expected": {"nope": "x"}}, "nope"),
    ],
)
@pytest.mark.parametrize(("judge", "factory"), JUDGES, ids=lambda part: part.__name__)
def test_arguments_of_a_wrong_kind_are_refused(
    judge: Callable[..., Any], factory: type, changes: dict[str, Any], message: str
) -> None:
    """Before anything runs, with what to write instead."""
    with pytest.raises(UsageError, match=message):
        judge(factory, **changes)


@pytest.mark.parametrize(("judge", "factory"), JUDGES, ids=lambda part: part.__name__)
def test_a_subject_is_given_as_a_factory(judge: Callable[..., Any], factory: type) -> None:
    """Each case starts from a fresh subject."""
    with pytest.raises(UsageError, match="takes a factory"):
        judge(3)
