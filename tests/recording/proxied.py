"""A proxy before a fake server, for tests: both on real loopback, in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollproof.cli.proxy import _by_default
from rollproof.core.contract import Contract
from rollproof.core.events.base import Event
from rollproof.fakes.http.serving import bound_socket
from rollproof.invariants import default_registry
from rollproof.judging.judge import Judge, Judgement, Tally
from rollproof.recording.proxy.detection import ServerFacts, detect
from rollproof.recording.proxy.proxy_server import ProxyOptions, RecordingProxy
from rollproof.store import TraceReader

__all__ = ["Proxied", "events_of", "judged", "proxied"]


@dataclass
class Proxied:
    """A running proxy; ``trace`` is complete when its block has ended."""

    url: str
    proxy: RecordingProxy
    folder: Path

    @property
    def trace(self) -> list[Event]:
        return [event for path in self.proxy.paths for event in events_of(path)]


@contextmanager
def proxied(
    url: str, folder: Path, contract: Contract | None = None, **options: Any
) -> Iterator[Proxied]:
    """A proxy to the server at ``url``."""
    if "facts" not in options:
        options["facts"] = detect(url)
    settings = ProxyOptions(
        url=url,
        folder=folder,
        contract=contract or _by_default(),
        takes_samples=contract is not None,
        **{"name": "p", "server_id": "s0", **options},
    )
    ready: list[Proxied | BaseException] = []
    started, end = threading.Event(), threading.Event()

    async def main() -> None:
        try:
            proxy = RecordingProxy(settings)
            async with proxy.serving(bound_socket()) as address:
                ready.append(Proxied(address, proxy, folder))
                started.set()
                await asyncio.to_thread(end.wait)
        except BaseException as error:
            ready.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    started.wait(30)
    running = ready[0]
    if not isinstance(running, Proxied):
        raise running
    try:
        yield running
    finally:
        end.set()
        thread.join(30)


def events_of(path: Path) -> list[Event]:
    """The events of one file of a trace, which was closed."""
    reader = TraceReader(path)
    events = list(reader)
    assert reader.ending is not None
    assert reader.ending.closed
    return events


def judged(*paths: Path) -> Judgement:
    """The verdicts of all checks over the files of a trace, as in ``rollproof check``."""
    tally = Tally(default_registry())
    for path in paths:
        for header, events in TraceReader(path).episodes():
            judge = Judge(header, tally)
            for event in events:
                judge.feed(event)
            judge.finish()
    return tally.judgement()


UNKNOWN_SERVER = ServerFacts()
