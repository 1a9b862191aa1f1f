"""What the harness publishes looks like what the stack publishes."""

from __future__ import annotations

import pytest

from rollproof.core.case import ActionKind
from rollproof.core.events.rollout import Result, Weights
from rollproof.core.records import Request, Version
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.engine.label_form import in_form
from rollproof.fakes.known_bugs._planting import act, case, request
from rollproof.verification.runner import run_case


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("step-3", "step-4"),
        ("run7/step-3.pt", "run7/step-4.pt"),
        ("step-0003", "step-0004"),
        ("3", "4"),
        ("b6589fc6", "4"),
        ("3-of-3", "4"),
        (3, 4),
        (1003, 4),
    ],
)
def test_a_label_has_the_form_of_the_stacks_own(label: Version, expected: Version) -> None:
    """Where the number stands in a string, the new one takes its place; else it is a string."""
    assert expected == in_form(4, [({3}, label)])


def test_the_first_label_in_which_the_number_stands_counts() -> None:
    """A server may still show the label of other weights; without any label it is the number."""
    assert "step-4" == in_form(4, [({2}, "step-1"), ({3}, "step-3")])
    assert 4 == in_form(4, [])


class _Named(AsSampled):
    """Publishes its weights as ``step-N``."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        for server in fleet.servers.values():
            server.relabel(f"step-{fleet.case.first_version}")

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            if server.alive:
                await server.pause()
                await server.load(self.fleet.weights_of(version), f"step-{version}")
                await server.resume()


@pytest.mark.parametrize(
    "action",
    [
        act(ActionKind.RELABEL, 2),
        act(ActionKind.SKEW, 2),
        act(ActionKind.LAG, 2),
        act(ActionKind.KILL, 2, steps=4),
    ],
)
@pytest.mark.parametrize("first", [0, 17])
def test_the_harness_publishes_strings_where_the_stack_does(action: object, first: int) -> None:
    """A new label, servers with other weights, and one that comes back."""
    schedule = case(
        act(ActionKind.SYNC_IDENTITY, 1),
        action,  # type: ignore[arg-type]
        act(ActionKind.RELABEL, 8),
        requests=(request(), request("r1", (31, 32, 33))),
        servers=2,
        first_version=first,
    )
    events = run_case(_Named, schedule).events
    labels = [event.label for event in events if isinstance(event, Weights)]
    assert {True} == {str(label).startswith("step-") for label in labels}, labels
    assert any(event.by_harness for event in events if isinstance(event, Weights))


class _Ordered(AsSampled):
    """Publishes ``step-N`` at its updates alone, and orders the labels that it sees."""

    async def rollout(self, request: Request) -> object:
        sample = await super().rollout(request)
        sorted({server.label for server in self.fleet.servers.values()})  # type: ignore[type-var]
        return sample

    update_weights = _Named.update_weights


def test_the_first_label_has_the_form_of_the_stacks_own() -> None:
    """A stack that orders its strings must not meet a number among them."""
    schedule = case(act(ActionKind.SYNC, 1), requests=(request(),), servers=2, first_version=17)
    events = run_case(_Ordered, schedule).events
    shown = [event.label for event in events if isinstance(event, Weights)]
    assert ["step-17"] * 2 == shown[:2]
    assert [None] == [event.error for event in events if isinstance(event, Result)]


def test_the_first_label_stays_a_number_where_the_stack_publishes_none() -> None:
    """A case without an update does not show the form."""
    events = run_case(_Ordered, case(requests=(request(),), servers=1)).events
    assert [0] == [event.label for event in events if isinstance(event, Weights)]
