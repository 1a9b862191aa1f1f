"""Make events of what a production loop reports, in the thread that writes them.

A loop's objects may be anything: what cannot be recorded is noted, and nothing is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollproof.core.call_ownership import Caller, Owners, named_request
from rollproof.core.engine_contract import PauseMode
from rollproof.core.error_text import describe_error
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Fault,
    Observation,
    Reply,
    Result,
    Submit,
    UpdatePhase,
)
from rollproof.core.events.training import Batch
from rollproof.core.json_codec import misfit_of
from rollproof.core.record_validation import (
    validate_output,
    validate_request,
    validate_rollout,
    validate_row,
    validate_samples,
)
from rollproof.core.records import Rollout, as_tokens
from rollproof.errors import RollproofError, UsageError
from rollproof.recording.background_writer import Dropped
from rollproof.recording.live_trace import LiveTrace, WallClock
from rollproof.recording.recorder import EngineCall
from rollproof.recording.taken_records import Taken

__all__ = ["LiveEvents"]


class LiveEvents:
    """Writes events; each method gets the time of its event first.

    Attributes:
        trace: Where they go.
        owners: The open requests, and whose calls are whose.
        batches: Where batches go, from the first one on.
    """

    def __init__(
        self,
        trace: LiveTrace,
        owners: Owners,
        clock: WallClock,
        open_batches: Callable[[], LiveTrace],
    ) -> None:
        self.trace = trace
        self.owners = owners
        self.batches: LiveTrace | None = None
        self._clock = clock
        self._open_batches = open_batches
        self._refused_calls: set[int] = set()

    @property
    def paths(self) -> list[Path]:
        """The files so far, those of batches last."""
        batches = [] if self.batches is None else self.batches.paths
        return [*self.trace.paths, *batches]

    def close(self) -> None:
        """Seal the files."""
        self.trace.close()
        if self.batches is not None:
            self.batches.close()

    def handle(self, item: Any) -> None:
        """Write what the loop reported, or note how much of it was dropped."""
        if isinstance(item, Dropped):
            self.trace.add_dropped(item.count, self._clock())
            return
        action, at, args = item
        action(at, *args)

    def flush(self) -> None:
        """Let what was written reach the files."""
        self.trace.flush()
        if self.batches is not None:
            self.batches.flush()

    def note_error(self, error: Exception) -> None:
        """Note an error that ``handle`` raised."""
        self.trace.add_error(error, self._clock())

    def refuse(self, _at: float, text: str) -> None:
        """Note that something of no request was lost."""
        raise UsageError(text)

    def submit(self, at: float, taken: Taken) -> None:
        """Write that a request was submitted."""
        with self._refusing(at, taken.request_id):
            request = validate_request(taken.record(), "The caller of submit()")
            if request.request_id in self.owners:
                raise UsageError(f"request {request.request_id!r} is already open")
            self.owners.begin(request)
            self.trace.add(Submit(request=request), at)

    def result(
        self, at: float, request_id: str, taken: list[Taken], several: bool, error: str | None
    ) -> None:
        """Write the end of a request, whose samples came as a list if there are ``several``."""
        with self._refusing(at, request_id):
            records = [sample.record() for sample in taken]
            samples: tuple[Rollout, ...] = ()
            if records != [None]:
                value = records if several else records[0]
                samples = validate_samples(value, "The caller of result()", self.trace.contract)
            event = Result(
                request_id=request_id,
                rollout=samples[-1] if samples else None,
                earlier=samples[:-1],
                error=error,
            )
            self._add_sound(event, at)
        if isinstance(request_id, str):
            self.owners.end(request_id)

    def call(self, at: float, call_id: int, taken: Taken, caller: Caller) -> None:
        """Write a call, with the requests that may own it."""
        running = caller[0]
        request_id = taken.request_id or (running.request_id if running is not None else "")
        self._refused_calls.add(call_id)
        with self._refusing(at, request_id, call_id):
            call: EngineCall = taken.record()
            prompt = as_tokens(call.prompt_ids, what="prompt_ids of to_call's EngineCall")
            owners = self._owners_of(call.request_id, prompt, caller)
            event = call.to_event(call_id, prompt, owners)
            self._add_sound(event, at)
            self.owners.asks(call_id, event.request_id)
            self._refused_calls.discard(call_id)

    def reply(self, at: float, call_id: int, taken: Taken) -> None:
        """Write the reply to a call."""
        if self._was_refused(call_id):
            return
        tokens: tuple[int, ...] = ()
        with self._refusing(at, "", call_id):
            output = validate_output(taken.record(), "to_output")
            tokens = output.token_ids
            self.trace.add(Reply(call_id=call_id, output=output), at)
        self.owners.answered(call_id, tokens)
        self.trace.forget_call(call_id)

    def lost(self, at: float, call_id: int, detail: str) -> None:
        """Write that the caller of a call got an error in place of a reply."""
        if self._was_refused(call_id):
            return
        self.owners.answered(call_id)
        self.trace.add(Fault(what="lost-reply", call_id=call_id, detail=detail), at)
        self.trace.forget_call(call_id)

    def unreadable(self, at: float, text: str, call_id: int | None, request_id: str = "") -> None:
        """Note that something of a call or a request cannot be read."""
        if call_id is not None:
            if self._was_refused(call_id):
                return
            self.owners.answered(call_id)
        self.trace.add_unreadable(text, at, call_id=call_id, request_id=request_id)

    def observation(self, at: float, taken: Taken) -> None:
        """Write tokens of the environment."""
        with self._refusing(at, taken.request_id):
            event: Observation = taken.record()
            event = replace(event, token_ids=as_tokens(event.token_ids))
            self._add_sound(event, at)
            self.owners.extend(event.request_id, event.token_ids)

    def plain(self, at: float, kind: type[Event], values: Mapping[str, Any]) -> None:
        """Write an event of plain values."""
        values = dict(values)
        for name, choices in (("mode", PauseMode), ("phase", UpdatePhase)):
            if name in values:
                values[name] = choices(values[name])
        self._add_sound(kind(**values), at, f"{kind.kind}: ")

    def batch(self, at: float, name: str, samples: list[Taken], rows: list[Taken]) -> None:
        """Write a batch, in a file of its own."""
        if self.batches is None:
            self.batches = self._open_batches()
        taken = tuple(
            validate_rollout(sample.record(), "The caller of batch()") for sample in samples
        )
        declared = self.trace.contract.columns
        made = tuple(validate_row(row.record(), "The caller of batch()", declared) for row in rows)
        event = Batch(name=name, samples=taken, rows=made)
        misfit = misfit_of(event)
        if misfit is not None:
            raise UsageError(f"batch(): {misfit}")
        self.batches.add(event, at)

    @contextmanager
    def _refusing(
        self, at: float, request_id: object, call_id: int | None = None
    ) -> Iterator[None]:
        """Note as unreadable what cannot be recorded: a loop's objects raise whatever they like."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as above
            text = str(error) if isinstance(error, RollproofError) else describe_error(error)
            named = request_id if isinstance(request_id, str) else ""
            self.trace.add_unreadable(text, at, request_id=named, call_id=call_id)

    def _add_sound(self, event: Event, at: float, where: str = "") -> None:
        """Write an event whose fields come from the loop. Raises ``UsageError`` if one of them
        cannot be written.
        """
        misfit = misfit_of(event)
        if misfit is not None:
            raise UsageError(f"{where}{misfit}")
        self.trace.add(event, at)

    def _owners_of(
        self, handle: str | None, prompt: tuple[int, ...], caller: Caller
    ) -> tuple[str, ...]:
        if handle is not None:
            return (named_request(handle, self.owners) or handle,)
        try:
            return self.owners.of(prompt, caller)
        except UsageError:
            return ("",)

    def _was_refused(self, call_id: int) -> bool:
        """Return whether a call is not in the trace: then its end would be that of no call."""
        try:
            self._refused_calls.remove(call_id)
        except KeyError:
            return False
        return True
