"""Requests that deliver several samples: what the runner takes, what it refuses, what a trace
holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollproof.core.contract import Samples
from rollproof.core.events.rollout import Result
from rollproof.core.records import Rollout
from rollproof.errors import SubjectError
from rollproof.fakes.clients.reference_clients import AsSampled, AsSampledBranches, AsSampledSteps
from rollproof.fakes.clients.resuming import ClientOptions
from rollproof.fakes.known_bugs._planting import TURNS
from rollproof.judging.event_words import describe_result
from rollproof.store import dump_trace, load_trace
from rollproof.verification.runner import run_case


def results(trace: Any) -> list[Result]:
    """The ends of the requests of a trace."""
    return [event for event in trace.events if isinstance(event, Result)]


def returning(native: Any, samples: Samples = Samples.BRANCH) -> type[AsSampled]:
    """A subject whose samples are what ``native`` makes of the one of a correct client."""

    class Returns(AsSampled):
        options = ClientOptions(multi_turn=True, samples=samples)

        def to_record(self, rollout: Rollout) -> Any:
            return native(rollout)

    return Returns


@pytest.mark.parametrize(("client", "count"), [(AsSampledSteps, 3), (AsSampledBranches, 2)])
@pytest.mark.parametrize("ending", ["json", "arrow"])
def test_every_sample_is_in_the_trace(
    client: type[AsSampled], count: int, ending: str, tmp_path: Path
) -> None:
    """Three turns are three steps, or two samples with one compaction; files hold them all."""
    trace = run_case(client, TURNS)
    path = tmp_path / f"trace.{ending}"
    dump_trace(trace, path)
    for found in (trace, load_trace(path)):
        (end,) = results(found)
        assert count == len(end.samples)
        assert end.rollout is end.samples[-1]
        assert f"delivered {count} samples, the last of " in describe_result(end)


def test_a_single_sample_or_none_may_come_without_a_list() -> None:
    """A stack that delivers one sample may return it as it is; an empty list is a drop."""
    (end,) = results(run_case(returning(lambda rollout: rollout), TURNS))
    assert 1 == len(end.samples)
    (end,) = results(run_case(returning(lambda rollout: []), TURNS))
    assert (None, ()) == (end.rollout, end.samples)


@pytest.mark.parametrize(
    ("native", "samples", "message"),
    [
        (
            lambda rollout: [rollout, rollout],
            "request",
            "to_record returned 2 samples for one request, and the contract declares samples='",
        ),
        (
            lambda rollout: [rollout, rollout],
            "branch",
            r"to_record returned one Rollout twice, as \[0\] and \[1\]",
        ),
        (
            lambda rollout: [rollout, 3],
            "branch",
            r"to_record, sample \[1\], must return a Rollout, not int 3",
        ),
        (
            lambda rollout: {"samples": [rollout]},
            "branch",
            "must return a list of Rollouts, since the contract declares samples='branch'",
        ),
    ],
)
def test_other_lists_of_samples_are_refused(native: Any, samples: str, message: str) -> None:
    """With the method, the place in the list, and what to declare."""
    with pytest.raises(SubjectError, match=message):
        run_case(returning(native, Samples(samples)), TURNS)
