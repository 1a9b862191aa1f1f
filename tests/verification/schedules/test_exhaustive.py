"""The small scope: complete, without repetition, and honest about its size."""

from __future__ import annotations

import json
from itertools import product

import pytest

from rollproof.core.case import ActionKind, Case
from rollproof.core.contract import Contract, ResumeBy
from rollproof.core.engine_contract import PauseMode
from rollproof.errors import UsageError
from rollproof.verification.schedules import (
    Scope,
    modes_for,
    scope_families,
    scope_size,
    small_scope,
)


def contract(resume: str = "client", **changes: object) -> Contract:
    base = {
        "rows": "none",
        "versions": "none",
        "logprobs": "raw",
        "abort_surfaces": False,
        "kv_policy": "recompute",
    }
    return Contract(resume=resume, **{**base, **changes})  # type: ignore[arg-type]


def key(case: Case) -> str:
    return json.dumps(case.to_dict(), sort_keys=True)


def family(name: str, *args: object, **kwargs: object) -> list[Case]:
    return next(list(cases) for found, cases in scope_families(*args, **kwargs) if found == name)  # type: ignore[arg-type]


def walk(budget: int, most: int, syncs: int) -> set[tuple[tuple[str, int, bool], ...]]:
    """All schedules by brute force: every sequence of (kind, tokens, race) in order of place, then
    those kept that a call can meet.
    """
    places = [*((tokens, False) for tokens in range(budget)), (budget, True), (budget, False)]
    rank = {place: i for i, place in enumerate(places)}
    out = set()
    for count in range(most + 1):
        for steps in product(product(("abort", "sync"), places), repeat=count):
            ranks = [rank[place] for _, place in steps]
            ended = [i for i, (_, (tokens, _)) in enumerate(steps) if tokens == budget]
            if (
                ranks == sorted(ranks)
                and sum(kind == "sync" for kind, _ in steps) <= syncs
                and ended in ([], [count - 1])
            ):
                out.add(tuple((kind, *place) for kind, place in steps))
    return out


@pytest.mark.parametrize(
    ("budget", "actions", "versions"), [(1, 3, 3), (2, 2, 3), (3, 3, 2), (4, 2, 1)]
)
def test_core_equals_a_brute_force_enumeration(budget: int, actions: int, versions: int) -> None:
    """For a subject that resumes, the core holds every schedule that a brute-force walk finds, for
    every prompt, and no other.
    """
    scope = Scope(response=budget, actions=actions, versions=versions)
    cases = family("aborts and syncs", "vllm", contract(), scope=scope)
    for prompt in (1, 2):
        chosen = [
            case
            for case in cases
            if len(case.requests[0].prompt_ids) == prompt and case.requests[0].max_tokens == budget
        ]
        found = [
            tuple((str(a.do), a.when.tokens, a.when.race) for a in case.actions) for case in chosen
        ]
        assert walk(budget, actions, versions - 1) == set(found)
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("resume", list(ResumeBy))
@pytest.mark.parametrize("surfaces", [False, True])
@pytest.mark.parametrize("flavour", ["vllm", "sglang", "trtllm"])
def test_no_case_twice_and_sizes_as_told(resume: ResumeBy, surfaces: bool, flavour: str) -> None:
    """Over all families no case occurs twice, and scope_size tells how many there are."""
    declared = contract(str(resume), abort_surfaces=surfaces, partial_off="dropped")
    scope = Scope(response=4, actions=2)
    keys = [key(case) for case in small_scope(flavour, declared, scope=scope)]
    size = scope_size(flavour, declared, scope=scope)
    assert len(set(keys)) == len(keys)
    assert size.pop("total") == len(keys) == sum(size.values())


def test_default_scope_fits_its_time_budget() -> None:
    """One flavour and one subject have at most about 6,000 cases (20 s at 3 ms each), whoever
    resumes.
    """
    sizes = {
        resume: scope_size("vllm", contract(str(resume), partial_off="dropped"))["total"]
        for resume in ResumeBy
    }
    assert sizes == {ResumeBy.CLIENT: 5834, ResumeBy.ENGINE: 5834, ResumeBy.NONE: 1632}


def test_every_abort_multiset_is_there() -> None:
    """Every multiset of up to three aborts before the last token occurs, alone and with one more on
    the last.
    """
    cases = family("aborts and syncs", "vllm", contract(), scope=Scope(response=3))
    seen = {
        tuple((a.when.tokens, a.when.race) for a in case.actions)
        for case in cases
        if case.requests[0].max_tokens == 3 and all(a.do is ActionKind.ABORT for a in case.actions)
    }
    assert {
        ((0, False),) * 3,
        ((2, False), (2, False), (3, True)),
        ((3, True),),
        ((3, False),),
        ((0, False), (1, False), (2, False)),
    } <= seen


def test_nothing_follows_an_abort_that_ends_the_request() -> None:
    """Where nobody resumes an aborted call, an abort is always the last action; where a client
    does, it is not.
    """

    def followed(declared: Contract) -> bool:
        cases = family("aborts and syncs", "vllm", declared, scope=Scope(response=3))
        return any(a.do is ActionKind.ABORT for case in cases for a in case.actions[:-1])

    assert not followed(contract("none"))
    assert not followed(contract("engine", abort_surfaces=True))
    assert followed(contract("engine"))
    assert followed(contract("client"))


def test_versions_are_bounded() -> None:
    """No schedule of the core or of the further pause modes shows more weight versions than the
    scope allows.
    """
    for versions in (1, 2, 3):
        scope = Scope(response=3, versions=versions)
        cases = [
            *family("aborts and syncs", "vllm", contract(), scope=scope),
            *family("other pause modes", "vllm", contract(), scope=scope),
        ]
        assert versions - 1 == max(
            sum(a.do is ActionKind.SYNC for a in case.actions) for case in cases
        )


@pytest.mark.parametrize(
    ("resume", "flavour", "modes"),
    [
        ("client", "vllm", (PauseMode.ABORT, PauseMode.WAIT)),
        ("client", "sglang", (PauseMode.ABORT,)),
        ("engine", "vllm", (PauseMode.KEEP, PauseMode.WAIT)),
        ("engine", "sglang", (PauseMode.RETRACT, PauseMode.IN_PLACE)),
        ("engine", "trtllm", (PauseMode.KEEP,)),
        ("none", "vllm", (PauseMode.WAIT, PauseMode.ABORT)),
    ],
)
def test_pause_modes_are_those_of_contract_and_engine(
    resume: str, flavour: str, modes: tuple[PauseMode, ...]
) -> None:
    """A pause mode is tried where the engine offers it and the subject can keep its promises under
    it.
    """
    assert modes == modes_for(flavour, contract(resume))


def test_side_families_vary_what_they_name() -> None:
    """Each side family holds cases, and these differ from the core in what the family is called
    after.
    """
    declared = contract(partial_off="dropped")
    scope = Scope(response=4, actions=2)
    assert {(True, True), (True, False)} == {
        (c.engine.prefix_cache, c.clear_cache)
        for c in family("prefix cache", "vllm", declared, scope=scope)
    }
    assert {1} == {
        c.engine.prefill_chunk for c in family("chunked prefill", "vllm", declared, scope=scope)
    }
    assert {2} == {c.model.eos_every for c in family("early end", "vllm", declared, scope=scope)}
    assert {(None, 4), (7, 4)} == {
        (c.requests[0].max_tokens, c.requests[0].limit)
        for c in family("budget as a limit", "vllm", declared, scope=scope)
    }
    assert {2, 3} == {c.servers for c in family("several servers", "vllm", declared, scope=scope)}
    assert all(
        c.actions[-1].when.queued for c in family("queued calls", "vllm", declared, scope=scope)
    )
    assert {False} == {
        c.partial for c in family("partial rollout off", "vllm", declared, scope=scope)
    }
    kinds = {
        (a.do, a.when.tokens)
        for c in family("every kind of action", "vllm", declared, scope=scope)
        for a in c.actions
    }
    assert {
        (kind, tokens)
        for kind in ActionKind
        for tokens in range(4)
        if kind
        not in ("abort", "abort-handle", "sync", "lag", "leave", "drop-routes", "drop-logprobs")
        and kind not in ("sync-merged", "evict-adapters")
    } == kinds


def test_a_later_request_waits_for_an_update_of_every_kind() -> None:
    """Two requests, one slot: the second queues behind a draining pause, and comes during the
    update where a pause aborts all.
    """
    found = family("a later request", "vllm", contract("none"), scope=Scope(response=4, actions=2))
    kinds = (
        ActionKind.SYNC,
        ActionKind.SYNC_UNLABELLED,
        ActionKind.SYNC_IDENTITY,
        ActionKind.RELABEL,
    )
    assert {(mode, kind) for mode in (PauseMode.WAIT, PauseMode.ABORT) for kind in kinds} == {
        (c.pause_mode, c.actions[0].do) for c in found
    }
    assert {(1, 2)} == {(c.engine.max_batch, len(c.requests)) for c in found}
    assert {0.0} == {c.arrivals[1] for c in found if c.pause_mode is PauseMode.WAIT}
    assert {0.5, 1.5, 2.5, 3.5} == {c.arrivals[1] for c in found if c.pause_mode is PauseMode.ABORT}


def test_turns_need_a_declaration() -> None:
    """Only a multi-turn contract gets requests with turns, in which every turn can be hit, and a
    model that ends its own.
    """
    assert [] == family("turns of the environment", "vllm", contract())
    found = family(
        "turns of the environment",
        "vllm",
        contract(multi_turn=True),
        scope=Scope(response=4, actions=2),
    )
    assert {2} == {c.model.eos_every for c in found} == {len(c.requests[0].turns) for c in found}
    assert {(), ("abort",), ("sync",)} == {tuple(str(a.do) for a in c.actions) for c in found}
    assert {1, 2, 3, 4} == {a.when.tokens for c in found for a in c.actions}
    assert not any(
        r.turns
        for c in small_scope("vllm", contract(), scope=Scope(response=3, actions=1))
        for r in c.requests
    )


def test_partial_off_needs_a_declaration() -> None:
    """Partial rollout is switched off only for a subject that declares what happens then."""
    assert scope_size("vllm", contract())["partial rollout off"] == 0


@pytest.mark.parametrize(
    "bounds", [{"prompt": 0}, {"response": 13}, {"actions": 6}, {"versions": 0}]
)
def test_bounds_beyond_enumeration_are_refused(bounds: dict[str, int]) -> None:
    """A scope that cannot be enumerated is refused, and the text names the bound and its range."""
    with pytest.raises(
        UsageError,
        match=rf"{next(iter(bounds))}={next(iter(bounds.values()))} must be between \d+ and \d+",
    ):
        Scope(**bounds)


def test_no_modes_is_refused() -> None:
    """An empty choice of pause modes is refused rather than enumerated as nothing."""
    with pytest.raises(UsageError, match="at least one of"):
        list(small_scope("vllm", contract(), modes=()))
