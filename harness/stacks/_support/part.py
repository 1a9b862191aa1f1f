"""Parts of stacks, as factories of subjects, each with the schedules that fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rollproof.core.case import Case
from rollproof.verification.schedules import Limits, profile_named, random_cases

__all__ = ["Part"]

_TURN_TOKENS = 4
"""On average a turn ends after so many tokens: without natural ends there is one turn only."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """A factory of subjects.

    ``turns``: requests get up to so many answers of the environment. ``thin``: under the profile
    ``pr``, one case in so many is run (all with a later request): for parts whose cases take long,
    such as those that speak HTTP.
    """

    name: str
    make: Callable[[], Any]
    flavours: tuple[str, ...]
    turns: int = 0
    thin: int = 1

    def __call__(self) -> Any:
        """A fresh subject."""
        return self.make()

    def cases(self, profile: str, seed: int | None = None) -> Iterator[Case]:
        """The profile's schedules, restricted to what the part can be asked for, and multi-turn
        ones where it has turns.
        """
        from rollproof.verification.contract_probe import probe
        from rollproof.verification.rollouts import cases_for

        settings = profile_named(profile)
        used = settings.seed_for(seed)
        thin = self.thin if profile == "pr" else 1
        yield from cases_for(self, profile=profile, seed=used, flavours=self.flavours, thin=thin)
        if not self.turns:
            return
        share = max(1, settings.random_cases // len(self.flavours))
        for flavour, contract, model in probe(self, self.flavours):
            drawn = random_cases(
                used,
                share,
                flavour=flavour,
                contract=contract,
                model=model,
                limits=Limits(turns=self.turns),
            )
            for case in islice(drawn, 0, None, thin):
                yield replace(case, model=replace(case.model, eos_every=_TURN_TOKENS))
