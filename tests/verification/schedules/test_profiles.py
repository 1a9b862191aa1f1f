"""Profiles: named amounts of schedules, and what seed a run gets."""

from __future__ import annotations

import pytest

from rollproof.core.contract import ResumeBy
from rollproof.errors import UsageError
from rollproof.verification.schedules import PROFILES, Profile, profile_named, scope_size
from tests.verification.schedules.test_exhaustive import contract


def test_profiles_grow() -> None:
    """pr, nightly, soak: each tries more of everything than the one before, and lists under its own
    name.
    """
    pr, nightly, soak = PROFILES.values()
    assert ["pr", "nightly", "soak"] == list(PROFILES) == [pr.name, nightly.name, soak.name]
    assert pr.random_cases < nightly.random_cases < soak.random_cases
    assert pr.max_examples < nightly.max_examples < soak.max_examples
    assert pr.steps < nightly.steps < soak.steps
    sizes = [
        scope_size("vllm", contract(), scope=profile.scope)["total"] for profile in (pr, nightly)
    ]
    assert sizes == sorted(sizes)
    assert soak.scope.response > nightly.scope.response


@pytest.mark.parametrize("resume", list(ResumeBy))
def test_pr_is_a_matter_of_seconds(resume: ResumeBy) -> None:
    """Under pr one subject on one flavour runs fewer than 1,000 cases."""
    pr = profile_named("pr")
    assert (
        scope_size("vllm", contract(str(resume), partial_off="dropped"), scope=pr.scope)["total"]
        + pr.random_cases
        < 1000
    )


def test_unknown_profile_lists_the_valid_ones() -> None:
    """A name that no profile has is refused with the names that exist."""
    with pytest.raises(
        UsageError,
        match=r"No profile is named 'nightlly'; choose one of \['pr', 'nightly', 'soak'\]",
    ):
        profile_named("nightlly")


def test_seed_of_a_run() -> None:
    """Pr is the same every time; nightly and soak draw a fresh seed; a given one wins."""
    assert profile_named("pr").seed_for(None) == 0
    assert 41 == profile_named("pr").seed_for(41) == profile_named("soak").seed_for(41)
    fresh = {profile_named("nightly").seed_for(None) for _ in range(4)}
    assert len(fresh) > 1 and all(0 <= seed < 2**31 for seed in fresh)


def test_negative_seed_is_refused() -> None:
    """A seed below 0 is refused."""
    with pytest.raises(UsageError, match="seed=-1 must be an integer >= 0"):
        Profile(name="x", random_cases=1, max_examples=1, steps=1).seed_for(-1)
