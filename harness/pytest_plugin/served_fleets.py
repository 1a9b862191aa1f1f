"""The fake servers of a test: started by its fixtures, and judged when its body has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollproof.core.contract import Contract
from rollproof.errors import ConformanceError
from rollproof.pytest_plugin.session_state import State
from rollproof.pytest_plugin.short_summary import HEADLINE
from rollproof.recording.served_fleet import ServedFleet

__all__ = ["judge_fleets", "start_fleets"]


def start_fleets(
    server: str,
    request: pytest.FixtureRequest,
    key: pytest.StashKey[list[ServedFleet]],
    state: State,
) -> Iterator[Callable[..., ServedFleet]]:
    """Yield the function that starts a fleet; end those that it started.

    Args:
        server: ``sglang`` or ``vllm``.
        request: that of the fixture.
        key: where an item has its fleets.
        state: that of the session.
    """
    item = request.node
    fleets = item.stash.setdefault(key, [])

    def start(contract: Contract | str | Path, **options: Any) -> ServedFleet:
        def add(report: Mapping[str, Any]) -> None:
            state.reports[f"{item.nodeid}#{len(state.reports)}"] = dict(report)

        fleet = ServedFleet(
            server,
            contract,
            **{
                "name": item.nodeid,
                "on_report": add,
                "only": state.only_of("rollouts"),
                **options,
            },
        )
        fleets.append(fleet)
        return fleet

    yield start
    # the item may run again
    item.stash[key] = []
    for fleet in reversed(fleets):
        fleet.stop()


def judge_fleets(item: pytest.Item, fleets: Sequence[ServedFleet], state: State) -> None:
    """End the fleets and judge what they saw; fail the item with the findings, or as unknown."""
    # the last one first, which found the others in the environment
    for fleet in reversed(fleets):
        fleet.stop()
    for fleet in fleets:
        failure = None
        try:
            fleet.judge()
        except ConformanceError as error:
            failure = error
        if failure is not None:
            item.stash[HEADLINE] = failure.headline
            plan = "".join(f"\n  {line}" for line in fleet.plan_lines)
            pytest.fail(f"{failure}{plan}", pytrace=False)
    for fleet in fleets:
        if fleet.undecided:
            if state.settings.unknown == "skip":
                pytest.skip(f"unknown: {fleet.undecided}")
            # for the plugin, which lists an unknown verdict as UNKNOWN
            item.user_properties.append(("rollproof_verdict", "unknown"))
            item.stash[HEADLINE] = f"unknown: {fleet.undecided}"
            pytest.fail(f"unknown: {fleet.undecided}", pytrace=False)
