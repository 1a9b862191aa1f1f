"""The ordered collection of checks that a run judges with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from rollproof.core.contract import Contract
from rollproof.errors import UsageError
from rollproof.judging.checks import Check

__all__ = ["Registry"]


class Registry:
    """An ordered, immutable collection of checks with unique ids."""

    def __init__(self, checks: Iterable[Check]) -> None:
        self._checks: dict[str, Check] = {}
        self._splits: dict[
            tuple[Contract, str], tuple[tuple[Check, ...], tuple[tuple[Check, str], ...]]
        ] = {}
        for check in checks:
            if check.id in self._checks:
                raise UsageError(f"Two checks have the id {check.id!r}.")
            if (check.request is None) == (check.trace is None):
                raise UsageError(
                    f"{check.id} must have exactly one of a request judge and a trace judge."
                )
            self._checks[check.id] = check

    def __iter__(self) -> Iterator[Check]:
        return iter(self._checks.values())

    def __len__(self) -> int:
        return len(self._checks)

    def split(
        self, contract: Contract, about: str = "rollouts"
    ) -> tuple[tuple[Check, ...], tuple[tuple[Check, str], ...]]:
        """Split the checks for traces of kind ``about`` under ``contract``.

        Returns:
            The checks that apply, and those that are ruled out with the reason.
        """
        split = self._splits.get((contract, about))
        if split is None:
            reasons = [
                (
                    check,
                    (
                        check.inapplicable(contract)
                        if check.judges(about)
                        else f"it judges {check.about}, and this trace is about {about}"
                    ),
                )
                for check in self
            ]
            split = (
                tuple(check for check, reason in reasons if reason is None),
                tuple((check, reason) for check, reason in reasons if reason is not None),
            )
            # Contracts may be random, so the cache is bounded.
            if len(self._splits) < 256:
                self._splits[contract, about] = split
        return split

    def __getitem__(self, check_id: str) -> Check:
        try:
            return self._checks[check_id]
        except KeyError:
            raise UsageError(self._unknown(check_id)) from None

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids, in order."""
        return tuple(self._checks)

    def select(self, only: Iterable[str]) -> Registry:
        """Return the checks with an id or family in ``only``.

        Raises:
            UsageError: A name matches nothing.
        """
        chosen = []
        for name in only:
            matches = [check for check in self if name in (check.id, check.family)]
            if not matches:
                raise UsageError(self._unknown(name))
            # A dict keeps the order and drops duplicates: a check may be named by its id and by its
            # family.
            chosen += matches
        return Registry(dict.fromkeys(chosen))

    def extended(self, checks: Iterable[Check]) -> Registry:
        """Return this registry with more checks at its end."""
        return Registry([*self, *checks])

    def _unknown(self, name: str) -> str:
        families = sorted({check.family for check in self})
        # Typos are the usual cause, so the nearest ids come before the list of families.
        similar = difflib.get_close_matches(name, [*self.ids, *families], n=3, cutoff=0.5)
        suggestion = f" Did you mean {' or '.join(similar)}?" if similar else ""
        return (
            f"No check or family is named {name!r}.{suggestion} `rollproof checks` lists all;"
            f" families are {', '.join(families)}."
        )
