"""Parts of stacks: factories of subjects, each with the schedules that fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rollproof.core.case import Case
from rollproof.verification.schedules import Limits, profile_named, random_cases

__all__ = ["Part", "by_name"]

_TURN_TOKENS = 4
"""Average length of a turn, in tokens: without natural ends there is one turn only."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """A factory of subjects.

    Fields:
        name: Name of the part in reports and matrices.
        make: Returns a subject.
        flavours: Engine flavours that the part speaks.
        turns: Most answers of the environment in a request; 0 for a part without turns.
        thin: Under the profile ``pr``, run one case in so many: for parts that take long, such as
            those that speak HTTP.
    """

    name: str
    make: Callable[[], Any]
    flavours: tuple[str, ...]
    turns: int = 0
    thin: int = 1

    def __call__(self) -> Any:
        """Return a fresh subject."""
        return self.make()

    def cases(self, profile: str, seed: int | None = None) -> Iterator[Case]:
        """The profile's schedules that fit the part, and multi-turn ones if it has turns."""
        from rollproof.verification.contract_probe import probe
        from rollproof.verification.rollouts import cases_for

        settings = profile_named(profile)
        used = settings.seed_for(seed)
        thin = self.thin if profile == "pr" else 1
        yield from cases_for(self, profile=profile, seed=used, flavours=self.flavours, thin=thin)
        if not self.turns:
            return
        # as many multi-turn cases as the profile has random ones, over all flavours
        share = max(1, settings.random_cases // len(self.flavours))
        # what a flavour is asked for depends on the contract of the part on it
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


def by_name(*parts: Part) -> dict[str, Part]:
    """The parts, by name."""
    return {part.name: part for part in parts}
