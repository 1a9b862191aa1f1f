"""The Arrow store: what was written is read back, in episodes, after appending, and after a killed
writer.
"""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Fault, Gauge, Reply, Submit
from rollproof.core.records import EngineOutput, FinishReason, Request
from rollproof.core.trace import EVENT_KINDS, Header, Trace
from rollproof.errors import TraceError, UsageError
from rollproof.store import TraceReader, TraceWriter, open_trace
from tests.support.random_records import alike, any_event, any_header
from tests.support.trace_builder import TraceBuilder, contract

HEADER = Header(subject="by hand", contract=contract())


def story(episode: int = 0) -> Trace:
    """A request that is aborted and resumed, with routes and logprobs."""
    builder = TraceBuilder(contract(), seed=episode)
    builder.weights(0).submit(prompt=(1, 2, 3))
    first = builder.call((1, 2, 3))
    builder.reply(
        first, (4, 5), "abort", prompt_len=3, output={"logprobs": np.array([-1.0, np.nan])}
    )
    second = builder.call((1, 2, 3, 4, 5), max_tokens=2)
    builder.reply(second, (6, 7), prompt_len=5)
    builder.result((4, 5, 6, 7), prompt=(1, 2, 3), logprobs=np.array([-1.0, np.nan, -0.5, -0.51]))
    return builder.trace()


def admits(count: int) -> list[Event]:
    return [Admit(index=i, time=float(i), call_id=i, server_id="s0") for i in range(count)]


def read(path: Path) -> list[tuple[Header, list[Event]]]:
    return [(header, list(events)) for header, events in TraceReader(path).episodes()]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(st.tuples(any_header(), st.lists(any_event(), max_size=6)), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_round_trip_of_any_events(
    tmp_path: Path, episodes: list[tuple[Header, list[Event]]], batch: int
) -> None:
    """Whatever events of whatever kinds are written, in however small batches, come back equal,
    episode by episode.
    """
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, episodes[0][0], mode="w", batch_events=batch) as writer:
        for number, (header, events) in enumerate(episodes):
            if number:
                writer.start(header)
            for event in events:
                writer.append(event)
    assert alike(episodes, read(path))


@pytest.mark.parametrize("kind", sorted(EVENT_KINDS))
def test_every_kind_of_event_is_drawn(kind: str, tmp_path: Path) -> None:
    """Each registered kind of event makes the round trip by itself: none is left out by chance."""

    @settings(
        max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(any_event(kind))
    def trip(event: Event) -> None:
        path = tmp_path / "trace.arrow"
        with TraceWriter(path, HEADER, mode="w") as writer:
            writer.append(event)
        assert alike([event], list(TraceReader(path)))

    trip()


@pytest.mark.parametrize("trusted", [False, True])
def test_subclasses_of_numbers_are_stored_as_numbers(tmp_path: Path, trusted: bool) -> None:
    """Stacks pass their own kinds of numbers, which msgspec does not write."""

    class Count(int):
        pass

    class Share(float):
        pass

    sampling = {"n": Count(4), "top_p": Share(0.5), "limit": Share("inf")}
    request = Request(request_id="r0", prompt_ids=(Count(1),), max_tokens=1, sampling=sampling)
    path = tmp_path / "trace"
    with TraceWriter(path, HEADER, trusted=trusted) as writer:
        writer.append(Submit(request=request))

    (event,) = TraceReader(path)

    assert isinstance(event, Submit)
    assert event.request.sampling == {"n": 4, "top_p": 0.5, "limit": float("inf")}
    assert [type(value) for value in event.request.sampling.values()] == [int, float, float]


def test_episodes_are_read_in_turn_and_may_be_skipped(tmp_path: Path) -> None:
    """A reader that takes only a part of an episode finds the next one complete, and the ending
    counts all of them.
    """
    path = tmp_path / "trace.arrow"
    stories = [story(i) for i in range(4)]
    with TraceWriter(path, stories[0].header, batch_events=3) as writer:
        for event in stories[0]:
            writer.append(event)
        for more in stories[1:]:
            writer.write(more)
    reader = TraceReader(path)
    seen = [
        (header.seed, [next(events).index for _ in range(2)])
        for header, events in reader.episodes()
    ]
    assert [(seed, [0, 1]) for seed in range(4)] == seen
    assert (4, 4 * len(stories[0].events), True, 0) == (
        (reader.ending.episodes, reader.ending.events, reader.ending.closed, reader.ending.lost)
        if reader.ending
        else None
    )
    assert 4 * len(stories[0].events) == len(list(reader))
    assert alike(stories[0].header, reader.header)


def test_reopening_goes_on_with_the_last_episode(tmp_path: Path) -> None:
    """Appending without a header continues the last episode; with one it begins another; an
    unclosed file can be appended to.
    """
    path = tmp_path / "trace.arrow"
    events = admits(7)
    with TraceWriter(path, HEADER) as writer:
        for event in events[:3]:
            writer.append(event)
    writer = TraceWriter(path, mode="a")
    assert (1, 3) == (writer.episodes, writer.events)
    for event in events[3:5]:
        writer.append(event)
    writer.flush()
    writer._file.close()  # as a killed process leaves it: flushed, not closed
    with TraceWriter(path, replace(HEADER, seed=1), mode="a") as writer:
        assert (2, 0) == (writer.episodes, writer.events)
        for event in events[5:]:
            writer.append(event)
    assert [(0, events[:5]), (1, events[5:])] == [
        (header.seed, read_back) for header, read_back in read(path)
    ]


def test_appending_to_nothing_makes_a_new_file(tmp_path: Path) -> None:
    """mode='a' creates the file where there is none."""
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER, mode="a") as writer:
        writer.append(admits(1)[0])
    assert [(HEADER, admits(1))] == read(path)


def test_killed_writer_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    """A writer killed with SIGKILL at full speed leaves every flushed event readable, in order, and
    the file open to appending.
    """
    program = textwrap.dedent("""
        import sys, itertools
        from rollproof.store import TraceWriter
        from rollproof.core.events.rollout import Admit
        from tests.store.test_arrow_format import HEADER
        writer = TraceWriter(sys.argv[1], HEADER, batch_events=50)
        for i in itertools.count():
            writer.append(Admit(index=i, time=float(i), call_id=i, server_id="s" * (i % 90)))
            if writer.events % 50 == 0:
                print(i, flush=True)
        """)
    for after in (1, 7):
        path = tmp_path / f"{after}.arrow"
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            flushed = 0
            for _ in range(after):
                flushed = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
        reader = TraceReader(path)
        read_back = [event.index for event in reader]
        assert len(read_back) >= flushed - 50
        assert list(range(len(read_back))) == read_back
        assert reader.ending is not None and not reader.ending.closed
        assert "did not close the file" in str(reader.ending)
        with TraceWriter(path, mode="a") as writer:
            assert len(read_back) == writer.events
            writer.append(Admit(index=len(read_back), call_id=0, server_id="s0"))
        reader = TraceReader(path)
        assert len(read_back) + 1 == len(list(reader))
        assert reader.ending is not None and reader.ending.closed


def test_flushed_events_can_be_read_while_writing(tmp_path: Path) -> None:
    """A reader of a file that is still being written sees what was flushed, and learns that it is
    not closed.
    """
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER) as writer:
        writer.append(admits(1)[0])
        assert [(HEADER, [])] == read(path)
        writer.flush()
        reader = TraceReader(path)
        assert admits(1) == list(reader)
        assert reader.ending is not None and (False, 0) == (
            reader.ending.closed,
            reader.ending.lost,
        )


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """A second writer of the same file is refused while the first is at work, and overwriting does
    not empty the file first.
    """
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER) as writer:
        writer.append(admits(1)[0])
        writer.flush()
        for mode in ("a", "w"):
            with pytest.raises(TraceError, match="being written by another process"):
                TraceWriter(path, HEADER, mode=mode)
    assert admits(1) == list(TraceReader(path))


def test_arrays_are_copied_in_and_viewed_out(tmp_path: Path) -> None:
    """What happens to an array after it was appended does not reach the trace; what is read is a
    read-only view, not a copy.
    """
    routes = np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    written = routes.copy()
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER) as writer:
        writer.append(
            Reply(
                call_id=0,
                output=EngineOutput(
                    token_ids=(1,), logprobs=None, routes=routes, finish_reason=FinishReason.STOP
                ),
            )
        )
        routes[:] = -1
    (event,) = TraceReader(path)
    assert isinstance(event, Reply) and event.output.routes is not None
    assert np.array_equal(written, event.output.routes)
    assert not event.output.routes.flags.writeable and event.output.routes.base is not None
    with pytest.raises(ValueError, match="read-only"):
        event.output.routes[0] = 0


@pytest.mark.parametrize("order", ["C", "F", "big-endian", "strided"])
def test_layout_of_an_array_does_not_matter(tmp_path: Path, order: str) -> None:
    """Fortran order, big-endian and strided arrays come back with equal values, little-endian."""
    base = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    layouts = {
        "C": base,
        "F": np.asfortranarray(base),
        "big-endian": base.astype(">u2"),
        "strided": np.repeat(base, 2, axis=0)[::2],
    }
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER) as writer:
        writer.append(
            Reply(
                call_id=0,
                output=EngineOutput(
                    token_ids=(1,),
                    logprobs=None,
                    routes=layouts[order],
                    finish_reason=FinishReason.STOP,
                ),
            )
        )
    (event,) = TraceReader(path)
    assert isinstance(event, Reply)
    assert alike(base, event.output.routes)


def test_a_file_of_an_older_version_is_read() -> None:
    """Schema 1 is read as it was written before lists of integers moved into the body of a row."""
    stories = [(trace.header, list(trace.events)) for trace in (story(0), story(1))]
    folder = Path(__file__).parent / "schema_1"
    assert b"$integers" in (folder / "story.arrow").read_bytes()
    assert alike([(HEADER, []), *stories], read(folder / "story.arrow"))
    assert alike(stories[0][1], list(open_trace(folder / "story.json")))


def test_any_arrow_library_reads_the_file(tmp_path: Path) -> None:
    """The file is one plain Arrow IPC stream: pyarrow alone reads it, also after appending; seals
    are rows of their own kind.
    """
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER) as writer:
        writer.write(story())
    with TraceWriter(path, mode="a") as writer:
        writer.append(admits(1)[0])
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    kinds = [kind for kind in table["kind"].to_pylist() if kind != "seal"]
    assert ["header", "header", *(event.kind for event in story()), "admit"] == kinds
    assert json.loads(str(table["body"].to_pylist()[-2])) == {"call_id": 0, "server_id": "s0"}


def test_memory_stays_flat_while_reading(tmp_path: Path) -> None:
    """Reading 96 MiB of routes raises the resident size of a process by less than 40 MiB."""
    path = tmp_path / "trace.arrow"
    routes = np.zeros((512, 48, 8), dtype=np.uint8)
    output = EngineOutput(
        token_ids=(1,), logprobs=None, routes=routes, finish_reason=FinishReason.STOP
    )
    with TraceWriter(path, HEADER) as writer:
        for i in range((96 << 20) // routes.nbytes):
            writer.append(Reply(index=i, call_id=i, output=output))
    program = textwrap.dedent("""
        import resource, sys
        from rollproof.store import TraceReader
        reader = TraceReader(sys.argv[1])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        count = sum(1 for _ in reader)
        print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
        """)
    out = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    ).stdout
    count, grown = map(int, out.split())
    assert (96 << 20) // routes.nbytes == count
    assert grown < 40


class UnknownAdmit(Admit):
    """An event that no trace knows."""


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            Gauge(name="x", value="many", phase="end"),
            r"The gauge event cannot be stored: value must be float, not 'many'",
        ),  # type: ignore[arg-type]
        (
            Gauge(name="x", value=1.0, phase="end", time=float("nan")),
            "The gauge event cannot be stored: its time is nan",
        ),
        (
            Submit(request=Request(request_id="r", prompt_ids=[1])),
            r"request.prompt_ids must be a tuple, not a list of 1",
        ),  # type: ignore[arg-type]
        (
            Submit(request=Request(request_id="r", prompt_ids=(1, 2**64))),
            r"request.prompt_ids\[1\] must fit 64 bits",
        ),
        (
            Submit(request=Request(request_id="r", prompt_ids=(1,), sampling={"a": object()})),  # type: ignore[dict-item]
            r"request.sampling\[a\] must be bool or int or float or str or null, not <object",
        ),
        (
            Reply(
                call_id=0,
                output=EngineOutput(
                    token_ids=(),
                    logprobs=None,
                    routes=np.array([[[None]]]),
                    finish_reason=FinishReason.STOP,
                ),
            ),
            r"output.routes must be an array of bool or int8 .* not of object",
        ),
        (
            UnknownAdmit(call_id=0, server_id="s"),
            "UnknownAdmit is not a kind of event that a trace holds",
        ),
    ],
)
def test_unstorable_events_are_refused_and_the_file_stays_readable(
    tmp_path: Path, event: Event, text: str
) -> None:
    """An event with a value that cannot be stored raises TraceError with its place; events before
    and after it are retained.
    """
    path = tmp_path / "trace.arrow"
    before, after = admits(2)
    with TraceWriter(path, HEADER) as writer:
        writer.append(before)
        with pytest.raises(TraceError, match=text):
            writer.append(event)
        writer.append(after)
    assert [before, after] == list(TraceReader(path))


def test_lone_surrogates_are_stored_as_escapes(tmp_path: Path) -> None:
    """A text that is no Unicode (an undecodable file name in an error) is stored escaped rather
    than refused.
    """
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER) as writer:
        writer.append(Fault(what="death", detail="no file \udce4\u00e4"))
    (event,) = TraceReader(path)
    assert isinstance(event, Fault)
    assert event.detail == "no file \\udce4\u00e4"


def test_wrong_use_of_a_writer(tmp_path: Path) -> None:
    """An existing file, a missing folder, a folder, no episode to continue, a closed writer: each
    is refused with the next step.
    """
    path = tmp_path / "trace.arrow"
    with pytest.raises(UsageError, match="holds no episode to continue: give a header"):
        TraceWriter(path, mode="a")
    path.unlink()
    with TraceWriter(path, HEADER) as writer:
        pass
    writer.close()
    with pytest.raises(UsageError, match="is closed: open it again with mode='a'"):
        writer.append(admits(1)[0])
    with pytest.raises(UsageError, match="exists: pass mode='a' to append to it"):
        TraceWriter(path, HEADER)
    with pytest.raises(UsageError, match="no folder for a trace"):
        TraceWriter(tmp_path / "no" / "trace.arrow", HEADER)
    with pytest.raises(UsageError, match="is a folder"):
        TraceWriter(tmp_path, HEADER, mode="w")
    with pytest.raises(UsageError, match="There is no trace at"):
        TraceReader(tmp_path / "nothing")


def test_full_disk_is_reported_and_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    """Where a flush fails the writer says so in our words, closes, and what was flushed before
    stays readable.
    """
    path = tmp_path / "trace.arrow"
    program = textwrap.dedent("""
        import resource, signal, sys
        import numpy as np
        from rollproof.errors import TraceError
        from rollproof.store import TraceWriter
        from tests.store.test_arrow_format import HEADER, admits
        from rollproof.core.records import EngineOutput, FinishReason
        from rollproof.core.events.rollout import Reply
        writer = TraceWriter(sys.argv[1], HEADER)
        writer.append(admits(1)[0])
        writer.flush()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        routes = np.zeros((1 << 17, 1, 1), np.uint8)
        stop = FinishReason.STOP
        output = EngineOutput(token_ids=(1,), logprobs=None, routes=routes, finish_reason=stop)
        writer.append(Reply(index=1, call_id=0, output=output))
        try:
            writer.flush()
        except TraceError as error:
            print(error)
        writer.close()
        """)
    out = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert f"{path} could not be written: [Errno {errno.EFBIG}]" in out
    assert "What was flushed before is readable" in out
    reader = TraceReader(path)
    assert admits(1) == list(reader)
    assert reader.ending is not None and reader.ending.lost > 0


def test_pyarrow_is_imported_only_for_arrow_traces() -> None:
    """Importing the store and using its JSON form does not import pyarrow."""
    program = "import sys, rollproof.store; print('pyarrow' in sys.modules)"
    assert (
        "False"
        == subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
