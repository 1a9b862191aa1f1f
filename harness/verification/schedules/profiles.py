"""Profiles: how much is tried, and whether every run tries the same."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollproof.errors import UsageError
from rollproof.verification.schedules.exhaustive import Scope

__all__ = ["PROFILES", "Profile", "profile_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """How much of each kind of schedule a run tries.

    scope: bounds of the exhaustive part.
    random_cases: how many seeded random cases follow it.
    max_examples, steps: those of Hypothesis tests and state machines.
    seed: the seed of a run without one of its own; ``None`` draws a fresh one each time, which the
        report names.
    """

    name: str
    scope: Scope = field(default_factory=Scope)
    random_cases: int
    max_examples: int
    steps: int
    seed: int | None = None

    def seed_for(self, seed: int | None) -> int:
        """Return ``seed`` if there is one, else that of this profile, else a fresh one.

        A fresh one is in 0 .. 2**31 - 1. Raises ``UsageError`` outside 0 .. 2**63 - 1.
        """
        if seed is not None and (isinstance(seed, bool) or not 0 <= seed < 2**63):
            raise UsageError(
                f"seed={seed!r} must be an integer >= 0, below 2**63; a report names the seed"
                " that repeats its run."
            )
        if seed is not None:
            return seed
        return secrets.randbelow(2**31) if self.seed is None else self.seed


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="pr",
            scope=Scope(response=4, actions=2, side_actions=1, side_response=3),
            random_cases=100,
            max_examples=50,
            steps=20,
            seed=0,
        ),
        Profile(name="nightly", random_cases=2_000, max_examples=1_000, steps=50),
        Profile(
            name="soak",
            scope=Scope(response=7, actions=3, side_actions=3, side_response=5),
            random_cases=50_000,
            max_examples=20_000,
            steps=100,
        ),
    )
}
"""``pr``: seconds, the same cases every time. ``nightly``: the complete small scope, fresh seeds.
``soak``: hours.

``pr`` covers, on every flavour, up to two aborts and syncs within four tokens, up to one in the
side families, and a hundred random cases over all flavours. ``rollproof verify`` without a subject
runs each reference so on one flavour, and one case in 25 on the others.
"""


def profile_named(name: str) -> Profile:
    """Return the profile called ``name``. Raises ``UsageError`` with the valid names."""
    try:
        return PROFILES[name]
    except (KeyError, TypeError):
        raise UsageError(f"No profile is named {name!r}; choose one of {list(PROFILES)}.") from None
