"""``StackPart``: a part of a stack in a test of the stack's own repository."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollproof import stacks
from rollproof.errors import StackError, UsageError
from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.stacks import Stack, StackPart
from rollproof.stacks._support.part import Part, by_name

LOGGER = "a_framework.rollouts"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """A stack with a part and a conversion, whose adapters silence a logger; how it was loaded."""
    calls: list[tuple[str, Any]] = []

    def load(spec: str, *, checkout: str | None = None) -> Stack:
        calls.append((spec, checkout))
        logging.getLogger(LOGGER).setLevel(logging.CRITICAL)
        client = Part(name="client", make=next(iter(REFERENCES.values())), flavours=("vllm",))
        return Stack(
            name=spec, version="1.0", parts=by_name(client), batches={"padded": lambda: "a batch"}
        )

    monkeypatch.setattr(stacks, "load_stack", load)
    stacks._load.cache_clear()
    yield calls
    stacks._load.cache_clear()
    logging.getLogger(LOGGER).setLevel(logging.NOTSET)


def test_a_stack_is_loaded_when_a_part_is_judged(loads: list[tuple[str, Any]]) -> None:
    """Not while pytest collects, and once for all parts of a checkout."""
    client = StackPart("verl", "client", checkout=Path("there"))
    padded = StackPart("verl", "padded", checkout="there")
    assert {"stack": "verl", "part": "client", "checkout": "there"} == client.recipe
    assert {"stack": "verl", "part": "client"} == StackPart("verl", "client").recipe
    assert [] == loads

    assert ("vllm",) == client.flavours
    assert "a batch" == padded()
    assert padded.flavours is None
    assert padded.cases("pr", 0) is None
    assert {"vllm"} == {case.flavour for case in client.cases("pr", 0) or ()}
    assert [("verl", "there")] == loads


def test_loggers_are_silent_while_a_part_is_judged(loads: list[tuple[str, Any]]) -> None:
    """And as they were before and after, for the other tests of the repository: also in the second
    part, for which nothing is loaded.
    """
    logger = logging.getLogger(LOGGER)
    for name in ("client", "padded"):
        logger.setLevel(logging.INFO)
        with StackPart("verl", name).loaded():
            assert logging.CRITICAL == logger.level
        assert logging.INFO == logger.level
    assert 1 == len(loads)


def test_a_part_that_a_stack_does_not_have_is_an_error(loads: list[tuple[str, Any]]) -> None:
    """It lists the parts of all kinds."""
    with pytest.raises(UsageError, match=r"verl 1\.0 has no part 'batch'.*'client', 'padded'"):
        StackPart("verl", "batch")()


def test_errors_of_loading_are_those_of_the_stack(tmp_path: Path) -> None:
    """A folder that is no checkout."""
    with pytest.raises(StackError, match="is not a checkout of trl"):
        StackPart("trl", "rollout-loop", checkout=tmp_path)()
