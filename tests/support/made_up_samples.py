"""A sample that no engine sampled, with routes at will."""

from __future__ import annotations

from collections.abc import Callable

from rollproof.core.records import IntArray
from rollproof.fakes.clients.reference_clients import PartialSample
from rollproof.fakes.known_bugs import sample_sources
from rollproof.judging.checks import Finding
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge

__all__ = ["hint_of_made_up"]


def hint_of_made_up(check_id: str, change: Callable[[IntArray], IntArray]) -> Finding:
    """Return the finding of a check about a made-up sample with ``change(its rows)``."""
    (bug,) = [bug for bug in sample_sources.BUGS if bug.id == "sample-made-up"]

    class Client(bug.make):  # type: ignore[name-defined, misc]
        async def run(self, sample: PartialSample) -> bool:
            ended: bool = await super().run(sample)
            if sample.request.request_id != "r0" and sample.rows is not None:
                sample.rows = change(sample.rows)
            return ended

    (finding,) = judge(run_case(Client, bug.cases[0]))[check_id].findings
    return finding
