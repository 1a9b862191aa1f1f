"""What a shell offers as values of arguments and options: ids of checks, stacks, engine flavours,
known bugs and so on.

Each function is called while the user types, and imports no more than it needs.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "complete_checks",
    "complete_engines",
    "complete_flavours",
    "complete_known_bugs",
    "complete_presets",
    "complete_profiles",
    "complete_repositories",
    "complete_stacks",
]


def complete_checks(incomplete: str) -> list[str]:
    """Return families of checks, and ids of checks once a family is written."""
    from rollproof.invariants import default_registry

    ids = default_registry().ids
    families = dict.fromkeys(check_id.partition(".")[0] for check_id in ids)
    return _matching(ids if "." in incomplete or incomplete in families else families, incomplete)


def complete_stacks(incomplete: str) -> list[str]:
    """Return the names of stacks."""
    from rollproof.stacks import STACKS

    return _matching(STACKS, incomplete)


def complete_repositories(incomplete: str) -> list[str]:
    """Return the stacks whose repositories ``adopt`` knows."""
    from rollproof.stacks.repositories import REPOSITORIES

    return _matching(REPOSITORIES, incomplete)


def complete_flavours(incomplete: str) -> list[str]:
    """Return the engine flavours."""
    from rollproof.fakes.engine.flavours import FLAVOURS

    return _matching(FLAVOURS, incomplete)


def complete_engines(incomplete: str) -> list[str]:
    """Return the engines that ``verify --engine`` judges."""
    from rollproof.engines.engine_targets import engine_names

    return _matching(engine_names(), incomplete)


def complete_known_bugs(incomplete: str) -> list[str]:
    """Return the ids of known bugs."""
    from rollproof.fakes.known_bugs import KNOWN_BUGS

    return _matching([bug.id for bug in KNOWN_BUGS], incomplete)


def complete_presets(incomplete: str) -> list[str]:
    """Return the stacks whose contracts can be started from."""
    from rollproof.contracts.presets import PRESETS

    return _matching(PRESETS, incomplete)


def complete_profiles(incomplete: str) -> list[str]:
    """Return the profiles of a run."""
    from rollproof.verification.schedules import PROFILES

    return _matching(PROFILES, incomplete)


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
