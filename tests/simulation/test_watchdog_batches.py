"""The watchdog of batches: a conversion that never ends is a refusal and the last one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from rollproof.errors import SubjectError
from rollproof.simulation import watchdog
from rollproof.verification.batches import judge_batches
from tests.support.busy_loop import spin
from tests.support.padded_batches import Padder


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is given up after a third of a second."""
    monkeypatch.setattr(watchdog, "_TICK", 0.05)
    monkeypatch.setenv(watchdog.VARIABLE, "0.3")


def test_rows_of_a_batch_that_never_end_are_reported() -> None:
    """They are read by the adapter, whose fault it is."""

    class Looping(Padder):
        def rows(self, batch: Any) -> Any:
            while True:
                pass

    with pytest.raises(
        SubjectError,
        match=r"rows never ended on the batch of .*: a step did not end within .* at rows",
    ):
        judge_batches(Looping)


def test_a_conversion_that_never_ends_is_a_refusal_and_the_last() -> None:
    """The other batches would take as long each."""

    class Looping(Padder):
        def collate(self, samples: Any) -> Any:
            while True:
                pass

    report = judge_batches(Looping)
    accepts = next(result for result in report.results if result.id == "batch.accepts")

    assert 1 == report.cases
    assert "a step did not end within" in accepts.findings[0].observed


@pytest.mark.parametrize("handles", ["returns", "raises", "is cancelled"])
def test_a_conversion_that_handles_its_end_is_a_refusal_all_the_same(handles: str) -> None:
    """What it does then is no outcome of its own, and the other batches would take as long."""

    class Handling(Padder):
        async def collate(self, samples: Any) -> Any:  # type: ignore[override]  # a conversion may be async
            try:
                await (
                    asyncio.gather(spin(), asyncio.sleep(1))
                    if handles == "is cancelled"
                    else spin()
                )
            except BaseException as error:
                if handles != "returns":
                    raise (asyncio.CancelledError if handles == "is cancelled" else ValueError)(
                        "mine"
                    ) from error
            return super().collate(samples)

    report = judge_batches(Handling)
    accepts = next(result for result in report.results if result.id == "batch.accepts")

    assert 1 == report.cases
    assert "a step did not end within" in accepts.findings[0].observed


def test_rows_that_handle_their_end_are_reported() -> None:
    """As those that do not."""

    class Handling(Padder):
        def rows(self, batch: Any) -> Any:
            turns = 0
            with contextlib.suppress(BaseException):
                while True:
                    turns += 1
            return batch

    with pytest.raises(
        SubjectError,
        match=r"rows never ended on the batch of .*: a step did not end within .* at rows",
    ):
        judge_batches(Handling)
