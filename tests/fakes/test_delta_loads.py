"""Deltas and checksums of fake engines: as rude as the real ones."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.events.rollout import Fault, Reply, Weights
from rollproof.core.events.weights import Checksums
from rollproof.fakes.engine.exceptions import TransferFailed
from tests.fakes.test_adapters import run_engine, sampled_by


async def _sample(server: Any) -> None:
    await server.generate(prompt_ids=[1, 2], max_tokens=1)


def test_a_delta_on_its_base_equals_all_tensors() -> None:
    """The same weights, and the same checksums."""
    told: list[Any] = []

    async def work(server: Any) -> None:
        await server.load_delta(1, 0, 1)
        await _sample(server)
        told.append(server.checksums())
        await server.load(1, 1)
        told.append(server.checksums())

    events = run_engine(work)
    assert [[1]] == sampled_by(events)
    assert told[0] == told[1]
    assert [None, 0, None] == [event.delta_of for event in events if isinstance(event, Weights)]
    assert [False, False, True] == [
        event.identity for event in events if isinstance(event, Weights)
    ]


def test_a_delta_on_other_weights_makes_weights_of_no_version() -> None:
    """Without a word; deltas on top do not help, and all tensors do."""

    async def work(server: Any) -> None:
        await server.load_delta(2, 1, 2)
        await _sample(server)
        await server.load_delta(3, 2, 3)
        await _sample(server)
        await server.load(3, 3)
        await _sample(server)

    assert [["altered"], ["altered"], [3]] == sampled_by(run_engine(work))


@pytest.mark.parametrize(("adds", "version"), [(False, 1), (True, "altered")])
def test_a_repeated_delta_harms_if_it_adds(adds: bool, version: int | str) -> None:
    """New values may be written again."""

    async def work(server: Any) -> None:
        for _ in range(2):
            await server.load_delta(1, 0, 1, adds=adds)
        await _sample(server)

    assert [[version]] == sampled_by(run_engine(work))


@pytest.mark.parametrize(("adds", "version"), [(False, 1), (True, "altered")])
def test_a_delta_that_breaks_is_applied_in_part(adds: bool, version: int | str) -> None:
    """The server serves what it has then; a repetition heals it unless it adds."""

    async def work(server: Any) -> None:
        server.fail_next_load = True
        with pytest.raises(TransferFailed, match="it has weights of no version now"):
            await server.load_delta(1, 0, 1, adds=adds)
        await _sample(server)
        await server.load_delta(1, 0, 1, adds=adds)
        await _sample(server)

    events = run_engine(work)
    assert [["altered"], [version]] == sampled_by(events)
    assert ["update-failure", "partial-update"] == [
        event.what for event in events if isinstance(event, Fault)
    ]


def test_kv_of_before_a_delta_is_of_older_weights() -> None:
    """A running call goes on under the new ones, as after any load."""

    async def work(server: Any) -> None:
        await server.load_delta(1, 0, 1)
        await server.load(1, 1)
        await _sample(server)

    reply = [event for event in run_engine(work, prefix_cache=True) if isinstance(event, Reply)][-1]
    assert [1] == [span.version for span in reply.true_rows or ()]


def test_checksums_differ_by_version_but_for_a_frozen_tensor() -> None:
    """Those of the trainer are the same; each telling is an event."""
    told: list[Any] = []

    async def work(server: Any) -> None:
        told.append(server.checksums())
        await server.load(1, 1)
        told.append(server.checksums())
        await server.load_adapter("policy", 2)
        told.append(server.checksums("policy"))

    events = run_engine(work)
    equal = {name for name in told[0] if told[0][name] == told[1][name]}
    assert {"embed_tokens.weight"} == equal
    assert [(0, None), (1, None), (2, "policy")] == [
        (event.version, event.adapter) for event in events if isinstance(event, Checksums)
    ]
    assert told[2] != told[1]
