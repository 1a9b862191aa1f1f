"""Writes docs/situations.md: which situations the enumerated cases of each profile meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.fakes.trainers.reference_batches import Collator
from rollproof.judging.situation_names import SITUATIONS
from rollproof.verification.batches import record_batches
from rollproof.verification.contract_probe import probe
from rollproof.verification.reports import situations
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import (
    PROFILES,
    Profile,
    corner_families,
    scope_families,
)

__all__ = ["situations_page"]

_FLAVOUR = "vllm"
_CONTRACTS: Mapping[str, str] = {
    "as-sampled": "a client resumes",
    "as-sampled-turns": "a client resumes, with turns of an environment",
    "as-sampled-limits": "a client resumes, with limits of its own and replies with gaps",
    "as-sampled-adapters": "a client resumes, and weight updates bring adapters",
    "as-sampled-deltas": "a client resumes, and weight updates bring deltas",
    "engine-keep": "the engine resumes",
    "partial-off": "nobody resumes",
}
_BATCHES = "a conversion of finished samples into training rows"
_LARGE = frozenset(
    {"aborts and syncs", "other pause modes", "prefix cache", "chunked prefill", "several servers"}
    | {"budget as a limit", "early end", "partial rollout off", "turns of the environment"}
)
_THIN: Mapping[str, int] = {"pr": 5, "nightly": 40, "soak": 1000}
"""One case in so many of the large families is run: a page is written in seconds."""


def situations_page() -> Iterator[str]:
    """docs/situations.md."""
    yield "# Situations\n"
    yield (
        "What every run meets, before random cases come on top. A report lists the situations under"
        " *exercised* (`-v` lists all): a check whose situation did not arise is unknown. Measured"
        f" with references on the flavour vllm: rollouts that {'; '.join(_CONTRACTS.values())}; and"
        f" {_BATCHES}."
    )
    batches = record_batches(Collator)
    converted = set(situations(batches.events, "batches", batches.header))
    met = {
        profile.name: [converted, *(_met(REFERENCES[name], profile) for name in _CONTRACTS)]
        for profile in PROFILES.values()
    }
    certain = {
        situation: [sum(situation in arisen for arisen in contracts) for contracts in met.values()]
        for situation in sorted(SITUATIONS)
    }
    most = len(_CONTRACTS)
    yield "\n## Under every contract of a rollout\n"
    yield _listed(name for name, counts in certain.items() if min(counts) >= most)
    yield "\n## Under some of them\n"
    yield _listed(name for name, counts in certain.items() if 0 < min(counts) < most)
    yield "\n## Only with a fault, another flavour, another entry point or a random case\n"
    yield _listed(name for name, counts in certain.items() if not min(counts))


def _listed(names: Iterable[str]) -> str:
    """Return the names in a sentence, those of one limit together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        head, limit, rest = name.partition(" limit, ")
        groups.setdefault(f"{head}{limit.rstrip(', ')}", []).extend([rest] if limit else [])
    parts = (f"{head} ({', '.join(of)})" if of else head for head, of in groups.items())
    return f"{'; '.join(parts)}."


def _met(factory: SubjectFactory, profile: Profile) -> set[str]:
    ((_, contract, model),) = probe(factory, (_FLAVOUR,))
    corners = (
        case for _, cases in corner_families(_FLAVOUR, contract, model=model) for case in cases
    )
    scope = (
        case
        for name, cases in scope_families(_FLAVOUR, contract, scope=profile.scope, model=model)
        for case in islice(cases, 0, None, _THIN[profile.name] if name in _LARGE else 1)
    )
    arisen: set[str] = set()
    for case in chain(corners, scope):
        if case.clear_cache:
            trace = run_case(factory, case)
            arisen |= set(situations(trace.events, "rollouts", trace.header))
    return arisen
