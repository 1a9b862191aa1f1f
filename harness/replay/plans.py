"""The steps that a trainer runs, as episodes on a fresh subject.

They test one law: the result of a step is a function of its weights, samples, routes and action. It
depends neither on what ran before (an aborted step, an evaluation, another mode), nor on whether
activations were recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import numpy as np

from rollproof.core.contract import Contract, Rows
from rollproof.core.events.replay import Action, Phase, Purpose
from rollproof.core.replay_contract import Defect, Recompute, ReplayTerms
from rollproof.core.trainer_contract import terms_of
from rollproof.errors import UsageError
from rollproof.replay.replay_samples import has_room_for_long, offered_defects

__all__ = [
    "DENSE",
    "EMPTY",
    "NO_RESPONSE",
    "SHORT",
    "Episode",
    "Planned",
    "RoutesFrom",
    "episodes_for",
    "random_episode",
    "random_episodes",
]

_T = TypeVar("_T")
DENSE = "no-moe-layers"
"""The variant of a subject whose model has no MoE layers."""
NO_RESPONSE, SHORT, EMPTY = (
    "a response of length 0",
    "sequences of 2 tokens",
    "a microbatch without samples",
)
"""Edge cases of samples."""


class RoutesFrom(StrEnum):
    """Where the routes of a step's samples come from."""

    NOWHERE = "nowhere"
    DRAWN = "drawn"
    """Drawn at random."""
    LARGEST = "largest"
    """Drawn from the largest expert ids."""
    CHOSEN = "chosen"
    """What the routers chose in an earlier step, as the spy saw it."""
    RECORDED = "recorded"
    """What the trainer recorded in an earlier step."""
    DISJOINT = "disjoint"
    """Drawn from what the routers did not choose in an earlier step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A step to run.

    ``batch`` numbers the set of samples, which may be ``long``. ``routes`` and ``of`` say
    where their routes come from, ``seed`` is that of drawn routes, and ``cut`` is the number of
    rows of a captured prefix. The other fields are those of ``Step``.
    """

    name: str
    action: Action
    purpose: Purpose = Purpose.TRAIN
    batch: int = 0
    long: bool = False
    routes: RoutesFrom = RoutesFrom.NOWHERE
    of: str = ""
    seed: int = 0
    cut: int | None = None
    recompute: Recompute = Recompute.NONE
    weights: int = 0
    nudge: float = 0.0
    nudge_layer: int | None = None
    model: str = "policy"
    variant: str = ""
    fail_at: int | None = None
    fail_in: Phase = Phase.FORWARD
    same_as: str = ""
    differs_from: str = ""
    defect: Defect | None = None
    edge: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """Steps that run in order on a fresh subject; the name is unique for a contract."""

    name: str
    steps: tuple[Planned, ...]


_RANDOM = {"pr": 0, "nightly": 30, "soak": 300}


def random_episodes(profile: str) -> int:
    """Return how many random episodes a profile adds. Raises ``UsageError`` for an unknown one."""
    if profile not in _RANDOM:
        raise UsageError(f"No profile is named {profile!r}; choose one of {list(_RANDOM)}.")
    return _RANDOM[profile]


def native(name: str = "native", **fields: object) -> Planned:
    """Return a step in which every router chooses by itself."""
    return Planned(name=name, action=Action.NATIVE, **fields)  # type: ignore[arg-type]


def drawn(name: str, **fields: object) -> Planned:
    """Return a step that replays random routes."""
    return replace(Planned(name=name, action=Action.REPLAY, routes=RoutesFrom.DRAWN), **fields)  # type: ignore[arg-type]


def chosen(name: str, of: str = "native", **fields: object) -> Planned:
    """Return a step that replays what the routers chose in step ``of``."""
    step = Planned(name=name, action=Action.REPLAY, routes=RoutesFrom.CHOSEN, of=of)
    return replace(step, **fields)  # type: ignore[arg-type]


def episodes_for(contract: Contract, extra: int = 0, seed: int = 0) -> Iterator[Episode]:
    """Yield the episodes that fit a trainer's contract, then ``extra`` random ones."""
    terms = terms_of(contract)
    yield _self_replay(terms)
    yield _drift(contract, terms)
    yield _placement(contract)
    if has_room_for_long(contract):
        yield _long_samples()
    yield from _recompute(terms)
    yield _old_logprob(terms)
    yield from _failures(contract, terms)
    yield _evaluation()
    yield _switching(terms)
    yield from _models(terms)
    yield from _unsupported(terms)
    yield _defects(contract)
    yield _edges()
    for number in range(extra):
        yield random_episode(contract, seed, number)


def _self_replay(terms: ReplayTerms) -> Episode:
    steps = [
        native(),
        # tells a trainer that does not repeat itself from one that replays wrongly
        native("native repeated", same_as="native"),
        chosen("self-replay", same_as="native"),
        # a target that stays installed after the replay would change this step
        native("native again", same_as="native"),
    ]
    if terms.records:
        steps += [
            Planned(name="recording", action=Action.RECORD, purpose=Purpose.OLD_LOGPROB),
            Planned(
                name="replay of the recording",
                action=Action.REPLAY,
                routes=RoutesFrom.RECORDED,
                of="recording",
                same_as="native",
            ),
        ]
    return Episode(name="self-replay", steps=tuple(steps))


def _drift(contract: Contract, terms: ReplayTerms) -> Episode:
    """Replay under other weights.

    It must change the results, its gradients must be the slope of its loss, and a reference must
    agree.
    """
    # between the rounding of the loss and the curvature of its slope
    size = 10.0 ** (-terms.float_digits / 4)
    layers = list(contract.moe_layers or ())
    # gates whose weights are gathered from scores that a top-k has zeroed get no gradient, and the
    # loss looks right (ISEEKYAN/Megatron-LM#79)
    slopes = [
        chosen(f"layer {layer} nudged {sign}", weights=1, nudge=factor * size, nudge_layer=layer)
        for layer in dict.fromkeys((layers[0], layers[-1]))
        for sign, factor in (("up", 1), ("down", -1))
    ]
    return Episode(
        name="drift",
        steps=(
            native(),
            native("native, drifted", weights=1),
            chosen("replay, drifted", weights=1, differs_from="native, drifted"),
            # a fault of the replay code is in every run with it: a path without that code shows it
            chosen("reference, drifted", weights=1, same_as="replay, drifted", variant="reference"),
            chosen(
                "own choice replayed, drifted",
                of="native, drifted",
                weights=1,
                same_as="native, drifted",
            ),
            Planned(
                # a replay that silently does nothing equals the native step (verl#7340)
                name="replay of what was not chosen",
                action=Action.REPLAY,
                routes=RoutesFrom.DISJOINT,
                of="native",
                differs_from="native",
            ),
            *slopes,
        ),
    )


def _placement(contract: Contract) -> Episode:
    """Replay routes that differ in every row, layer and sample, for several batches in turn."""
    steps = [
        drawn("first batch", seed=1),
        drawn("second batch", batch=1, seed=2),
        drawn("other routes for the first batch", seed=3),
        Planned(
            # ids above 255 wrap in storage of eight bits (verl#7407, ms-swift#9981)
            name="largest expert ids",
            action=Action.REPLAY,
            routes=RoutesFrom.LARGEST,
            seed=4,
            batch=1,
        ),
        # targets of the batches in between must have left no trace
        drawn("first batch again", seed=1, same_as="first batch"),
    ]
    if contract.rows is Rows.CAPTURED_PREFIX:
        steps += [
            native(),
            chosen("self-replay of a captured prefix", cut=2),
            drawn("a captured prefix", seed=5, cut=2),
        ]
    return Episode(name="placement", steps=tuple(steps))


def _long_samples() -> Episode:
    """Replay samples that are longer than those of the other episodes.

    A buffer for targets, or a block of a kernel, may end in the middle of them.
    """
    return Episode(
        name="long samples",
        steps=(
            native(long=True),
            chosen("self-replay", long=True, same_as="native"),
            drawn("first batch", long=True, seed=1),
            drawn("second batch", long=True, batch=1, seed=2),
            drawn("first batch again", long=True, seed=1, same_as="first batch"),
        ),
    )


def _recompute(terms: ReplayTerms) -> Iterator[Episode]:
    for kind in terms.recompute:
        if kind is Recompute.NONE:
            continue
        yield Episode(
            name=f"{kind} recompute",
            steps=(
                native(),
                chosen("self-replay, recomputed", recompute=kind, same_as="native"),
                drawn("replay", weights=1, seed=1),
                drawn(
                    # Megatron queues a target for the backward pass even if none follows, and the
                    # next recompute takes it (SkyRL#1908)
                    "other routes, forward only",
                    weights=1,
                    seed=2,
                    batch=1,
                    purpose=Purpose.OLD_LOGPROB,
                ),
                drawn("replay, recomputed", weights=1, seed=1, recompute=kind, same_as="replay"),
                drawn("other routes, recomputed", weights=1, seed=3, recompute=kind),
                native("native, recomputed", recompute=kind, same_as="native"),
            ),
        )


def _old_logprob(terms: ReplayTerms) -> Episode:
    """Compute old logprobs under some weights, and train under others, as an update does."""
    if terms.records:
        steps = [Planned(name="old logprobs", action=Action.RECORD, purpose=Purpose.OLD_LOGPROB)]
        update = Planned(
            name="update", action=Action.REPLAY, routes=RoutesFrom.RECORDED, of="old logprobs"
        )
        steps += [update, replace(update, name="update, drifted", weights=1)]
    else:
        steps = []
    steps += [
        drawn("old logprobs of the rollout's routes", seed=1, purpose=Purpose.OLD_LOGPROB),
        drawn("update with the rollout's routes", seed=1),
        drawn("second update, drifted", seed=1, weights=1),
        drawn(
            "old logprobs of the next batch",
            seed=2,
            batch=1,
            weights=1,
            purpose=Purpose.OLD_LOGPROB,
        ),
        drawn("update of the next batch", seed=2, batch=1, weights=1),
    ]
    return Episode(name="old logprobs", steps=tuple(steps))


def _failures(contract: Contract, terms: ReplayTerms) -> Iterator[Episode]:
    """Fail in the middle of a forward pass, and of a recompute."""
    places = [(Phase.FORWARD, Recompute.NONE)]
    # not selective recompute, which may leave the routers out
    if Recompute.FULL in terms.recompute:
        places.append((Phase.RECOMPUTE, Recompute.FULL))
    for phase, recompute in places:
        yield Episode(
            name=f"failure in {phase}",
            steps=(
                native(),
                drawn("replay", seed=1),
                drawn(
                    "failing replay",
                    seed=2,
                    recompute=recompute,
                    # in the middle: some routers have used their target, the others have not
                    fail_at=max(len(contract.moe_layers or ()) - 1, 0) // 2,
                    fail_in=phase,
                ),
                native("native after the failure", same_as="native"),
                drawn("replay after the failure", seed=1, same_as="replay", recompute=recompute),
            ),
        )


def _evaluation() -> Episode:
    return Episode(
        name="evaluation",
        steps=(
            native("evaluation", purpose=Purpose.EVAL, batch=1),
            native(),
            drawn("replay", seed=1),
            native(
                "evaluation after a replay", purpose=Purpose.EVAL, batch=1, same_as="evaluation"
            ),
            drawn("replay after an evaluation", seed=1, same_as="replay"),
            drawn("evaluation that replays", seed=2, batch=1, purpose=Purpose.EVAL),
            native("native after an evaluation", same_as="native"),
        ),
    )


def _switching(terms: ReplayTerms) -> Episode:
    recording = Planned(
        name="recording", action=Action.RECORD, purpose=Purpose.OLD_LOGPROB, batch=1
    )
    # a fix of R2 asked an empty registry when replay was off, broke those jobs and was reverted
    # (verl#7106, verl#7786)
    off = Planned(name="off", action=Action.OFF, routes=RoutesFrom.DRAWN, seed=3, same_as="native")
    steps = [
        native(),
        drawn("replay", seed=1),
        *(
            [recording, drawn("replay after a recording", seed=1, same_as="replay")]
            if terms.records
            else []
        ),
        native("native after a replay", same_as="native"),
        off,
        replace(off, name="off, without routes", routes=RoutesFrom.NOWHERE),
        drawn("replay after off", seed=1, same_as="replay"),
        native("native after off", same_as="native"),
    ]
    return Episode(name="switching", steps=tuple(steps))


def _models(terms: ReplayTerms) -> Iterator[Episode]:
    # hooks that are registered for every model replay a critic or a teacher, too (slime#1187,
    # NeMo-RL#4083)
    for model in terms.models:
        forward = Purpose.OLD_LOGPROB
        yield Episode(
            name=f"model {model}",
            steps=(
                native(f"{model} alone", model=model, purpose=forward),
                drawn("replay", seed=1),
                drawn(
                    f"{model} while the policy is replayed",
                    seed=1,
                    model=model,
                    purpose=forward,
                    same_as=f"{model} alone",
                ),
                drawn("replay again", seed=1, same_as="replay"),
                native(
                    f"{model} afterwards", model=model, purpose=forward, same_as=f"{model} alone"
                ),
            ),
        )


def _unsupported(terms: ReplayTerms) -> Iterator[Episode]:
    for name in terms.unsupported:
        yield Episode(
            name=f"router {name}",
            steps=(drawn(f"replay on the router {name}", seed=1, variant=name),),
        )
    yield Episode(
        name=DENSE,
        steps=(
            drawn(
                "replay without MoE layers",
                seed=1,
                variant=DENSE,
                edge="a model without MoE layers",
            ),
        ),
    )


def _defects(contract: Contract) -> Episode:
    defects = [
        drawn(f"routes that are {defect}", seed=1, defect=defect)
        for defect in offered_defects(contract)
    ]
    return Episode(
        name="bad routes",
        steps=(
            native(),
            drawn("replay", seed=1),
            *defects,
            native("native after bad routes", same_as="native"),
        ),
    )


def _edges() -> Episode:
    return Episode(
        name="edges",
        steps=(
            native(),
            drawn("replay", seed=1),
            drawn("a sample without response", seed=1, edge=NO_RESPONSE),
            drawn("samples of two tokens", seed=1, edge=SHORT),
            drawn("an empty microbatch", seed=1, edge=EMPTY),
            drawn("scores that are NaN", seed=1, weights=-1, edge="NaN scores"),
            native("native after the edges", same_as="native"),
        ),
    )


def random_episode(contract: Contract, seed: int, number: int) -> Episode:
    """Return a random sequence of steps that repeats a few different ones.

    Each must agree with the first one of the same weights, samples, routes and action. In between,
    steps fail, recompute, record, or run with replay switched off.
    """
    terms = terms_of(contract)
    random = np.random.default_rng([seed, number])
    # an update has most ways to go wrong
    update = replace(_random_step(contract, random, share=1.0), purpose=Purpose.TRAIN)
    pool = [update, *(_random_step(contract, random, share=0.6) for _ in range(3))]
    first: dict[tuple[object, ...], str] = {}
    steps = []
    for i in range(int(random.integers(6, 12))):
        step = _varied(replace(_pick(pool, random), name=f"step {i}"), contract, terms, random)
        if step.fail_at is None:
            action = Action.REPLAY if step.action is Action.REPLAY else Action.NATIVE
            key = (action, step.purpose, step.weights, step.batch, step.seed, step.cut)
            step = replace(step, same_as=first.get(key, ""))
            first.setdefault(key, step.name)
        steps.append(step)
    return Episode(name=f"random {seed}.{number}", steps=tuple(steps))


def _random_step(contract: Contract, random: np.random.Generator, *, share: float) -> Planned:
    """Draw everything that the results of a step depend on; a ``share`` of steps replays."""
    replays = random.random() < share
    cut = 2 if replays and contract.rows is Rows.CAPTURED_PREFIX and random.random() < 0.3 else None
    return Planned(
        name="",
        action=Action.REPLAY if replays else Action.NATIVE,
        purpose=_pick([Purpose.TRAIN, Purpose.TRAIN, Purpose.OLD_LOGPROB, Purpose.EVAL], random),
        batch=int(random.integers(2)),
        routes=RoutesFrom.DRAWN if replays else RoutesFrom.NOWHERE,
        seed=int(random.integers(3)) if replays else 0,
        cut=cut,
        weights=int(random.integers(3)),
    )


def _varied(
    step: Planned, contract: Contract, terms: ReplayTerms, random: np.random.Generator
) -> Planned:
    """Change a step in ways that must not change its results, or let it fail."""
    if step.action is Action.NATIVE and step.purpose is Purpose.OLD_LOGPROB and terms.records:
        step = replace(step, action=_pick([Action.NATIVE, Action.RECORD], random))
    if step.action is Action.NATIVE and random.random() < 0.3:
        routes = _pick([RoutesFrom.NOWHERE, RoutesFrom.DRAWN], random)
        step = replace(step, action=Action.OFF, routes=routes)
    if step.purpose is Purpose.TRAIN:
        step = replace(step, recompute=_pick(terms.recompute, random))
    if step.action is Action.REPLAY and random.random() < 0.2:
        phase = (
            Phase.RECOMPUTE
            if step.recompute is Recompute.FULL and random.random() < 0.5
            else Phase.FORWARD
        )
        step = replace(
            step, fail_at=int(random.integers(2 * len(contract.moe_layers or ()))), fail_in=phase
        )
    return step


def _pick(values: Sequence[_T], random: np.random.Generator) -> _T:
    return values[int(random.integers(len(values)))]
