"""Small cases in which known bugs show, and helpers that put a faulty engine under a correct
client.
"""

from __future__ import annotations

from typing import Any

from rollproof.core.case import Action, ActionKind, Case, Model, Trigger
from rollproof.core.records import Request
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.resuming import AsSampled
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet

__all__ = [
    "ABORTED",
    "CLEAN",
    "EMPTY",
    "ENDING",
    "LAST",
    "SYNCED",
    "TURNS",
    "act",
    "case",
    "on_engine",
    "on_policy",
    "request",
]

# A model that ends its turns itself, after three tokens on average.
ENDING = Model(eos_every=3)


def request(
    name: str = "r0",
    prompt: tuple[int, ...] = (11, 12, 13),
    max_tokens: int | None = 6,
    **fields: Any,
) -> Request:
    """Return a small request; ``fields`` are other fields of ``Request``."""
    return Request(request_id=name, prompt_ids=prompt, max_tokens=max_tokens, **fields)


def act(
    kind: ActionKind,
    tokens: int,
    request: str = "r0",
    *,
    race: bool = False,
    queued: bool = False,
    **fields: Any,
) -> Action:
    """Return ``kind`` once ``request`` has sampled ``tokens`` tokens; ``fields`` are others of
    ``Action``.
    """
    when = Trigger(request=request, tokens=tokens, race=race, queued=queued)
    return Action(when=when, do=kind, **fields)


def case(
    *actions: Action,
    requests: tuple[Request, ...] = (request(),),
    flavour: str = "vllm",
    **fields: Any,
) -> Case:
    """Return a case of ``requests`` under ``actions``; ``fields`` are other fields of ``Case``."""
    return Case(flavour=flavour, requests=requests, actions=actions, **fields)


# One request without any action.
CLEAN = case()
# An abort in the middle, under one weight version.
ABORTED = case(act(ActionKind.ABORT, 3))
# An abort before the first token.
EMPTY = case(act(ActionKind.ABORT, 0))
# An abort that wins over the natural end on the last token.
LAST = case(act(ActionKind.ABORT, 6, race=True))
# A weight update in the middle, which aborts the call.
SYNCED = case(act(ActionKind.SYNC, 3))
# Three turns of the model with the environment's tokens between them.
TURNS = case(model=ENDING, requests=(request(max_tokens=24, turns=((21, 22), (23, 24))),), seed=1)


def on_engine(engine: type[FakeEngine], client: type[AsSampled] = AsSampled) -> SubjectFactory:
    """Return ``client``, unchanged, on servers of the class ``engine``."""

    class Client(client):  # type: ignore[misc, valid-type]
        def start(self, fleet: Fleet) -> None:
            for server in fleet.servers.values():
                server.__class__ = engine
            super().start(fleet)

    Client.__name__ = engine.__name__
    return Client


def on_policy(policy: type[CodedPolicy], client: type[AsSampled] = AsSampled) -> SubjectFactory:
    """Return ``client``, unchanged, on servers that sample from ``policy``; the oracle stays
    correct.
    """

    class Client(client):  # type: ignore[misc, valid-type]
        def start(self, fleet: Fleet) -> None:
            for server in fleet.servers.values():
                server._scheduler._policy = policy.from_dict(fleet.policy.to_dict())
            super().start(fleet)

    Client.__name__ = policy.__name__
    return Client
