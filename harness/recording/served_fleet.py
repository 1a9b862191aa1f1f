"""Fake servers for the time of a test, whose trace is judged at its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollproof.contracts.contract_file import read_contract
from rollproof.core.case import Model
from rollproof.core.contract import Contract
from rollproof.core.error_text import show
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Result, Submit
from rollproof.core.files import check_target
from rollproof.core.trace import Trace
from rollproof.errors import TraceError, UsageError
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.http.gateway import RouterKind
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import SERVERS, ServingThread, bound_socket
from rollproof.http_clients.server_addresses import environment, known_servers
from rollproof.judging.checks import Verdict
from rollproof.judging.report import Report
from rollproof.recording.saving import save_trace
from rollproof.recording.verdicts import checks_of_rollouts, raise_for_verdicts, report_of
from rollproof.verification.argument_checks import as_expected, as_path

__all__ = ["ServedFleet"]


class ServedFleet:
    """Fake servers on free ports of this machine, in a thread of their own.

    While they serve, the environment names their address (``ROLLPROOF_URL``, ``OPENAI_BASE_URL``),
    for clients in this process and in those that it starts. At the end of a ``with`` block the
    trace is judged: findings raise ``ConformanceError``, and ``UsageError`` says that nothing could
    be judged. An exception of the block passes unchanged; the trace is then saved, but not judged.

    Args:
        server: ``sglang`` or ``vllm``.
        contract: what the samples promise, or the path of its file; the model has its sizes.
        flavour: the release to emulate; by default the newest.
        servers: their number; several have a router before them.
        router: the router to emulate, ``gateway`` or ``slime``.
        plan: what goes wrong: a ``FaultPlan``, a mapping of its fields, or the path of its file.
        options: more fields of ``ServeOptions``, such as ``seed``.
        only: ids or families of checks; default: all checks of rollouts.
        expected: ids of checks that are known to fail, with the reason.
        save: a file for the trace, which ``rollproof check`` reads.
        name: the subject's name in the report.
        on_report: is called with the JSON report.

    Attributes:
        url: the address to call: that of the server, or of the router.
        urls: the addresses of the servers.
        plan_lines: what became of the plan, after the end.
        undecided: why nothing was judged, after ``judge``; empty if something was.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        server: str,
        contract: Contract | str | Path,
        *,
        flavour: str | None = None,
        servers: int = 1,
        router: str = "gateway",
        plan: FaultPlan | Mapping[str, Any] | str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        only: Iterable[str] = (),
        expected: Mapping[str, str] | None = None,
        save: str | Path | None = None,
        name: str = "served",
        on_report: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        promised = read_contract(Path(contract)) if isinstance(contract, str | Path) else contract
        if not isinstance(promised, Contract):
            raise UsageError(
                "A fleet takes the Contract that the client's samples promise, such as"
                f" rollproof.contracts.slime(), or the path of its file, not {show(contract)}."
            )
        if not isinstance(servers, int) or not 1 <= servers <= 64:
            raise UsageError(f"servers={show(servers)} must be a number of servers, from 1 to 64.")
        if router not in list(RouterKind):
            raise UsageError(
                f"router={show(router)} must be one of {[str(kind) for kind in RouterKind]}."
            )
        self._registry = checks_of_rollouts(only)
        self._expected = as_expected(expected)
        self._save = None if save is None else as_path(save, "save")
        if self._save is not None:
            check_target(self._save)
        self._name, self._on_report = name, on_report
        self._options = _options(server, promised, flavour, options or {})
        self._events: list[Event] = []
        self._report: Report | None = None
        self.plan_lines: list[str] = []
        self.undecided: str = ""
        faults = _plan(plan)  # before a port is taken
        sockets = [bound_socket() for _ in range(servers if servers == 1 else servers + 1)]
        self._thread: ServingThread | None = ServingThread(
            server,
            self._options,
            sockets,
            sinks=[self],
            plan=faults,
            kind=RouterKind(router),
        )
        addresses = self._thread.urls
        self.url: str = addresses[0]
        self.urls: tuple[str, ...] = tuple(addresses if servers == 1 else addresses[1:])
        # a second fleet of the same test is called first, and the other one is still known
        variables = environment([*addresses, *known_servers()])
        self._before: Mapping[str, str | None] = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)

    @property
    def recorded(self) -> Trace:
        """The trace so far."""
        header = replace(EngineBackend.header(self._options), subject=self._name)
        return Trace(header=header, events=tuple(self._events))

    @property
    def report(self) -> Report:
        """The verdicts. Raises ``UsageError`` before the end."""
        if self._report is None:
            raise UsageError("There are no verdicts before the servers have ended.")
        return self._report

    def append(self, event: Event) -> None:
        """Take an event of the servers (``TraceSink``)."""
        self._events.append(event)

    def update_weights(self, name: str) -> None:
        """Bring the weights ``name`` to every server, as a trainer does that stops the engines:
        calls are aborted, the cache is dropped, and ``name`` is the new label. It blocks: in a
        coroutine ``await asyncio.to_thread(fleet.update_weights, "w1")``.
        """
        if self._thread is None:
            raise UsageError("The servers have ended: their weights cannot be updated.")
        self._thread.update_weights(name)

    def stop(self) -> None:
        """End the servers and save the trace; nothing, if they have ended.

        Raises:
            TraceError: the trace could not be saved.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        _restore(self._before)
        self.plan_lines = thread.stop()
        trouble = None if self._save is None else save_trace(self.recorded, self._save)
        if trouble is not None:
            raise trouble

    def judge(self) -> Report:
        """Judge the trace. Raises ``ConformanceError`` with the findings."""
        __tracebackhide__ = True
        report = report_of(self.recorded, self._registry, self._expected)
        self.undecided = self._why_undecided(report)
        self._report = replace(report, notes=(self.undecided,)) if self.undecided else report
        if self._on_report is not None:
            self._on_report(self._report.to_dict())
        raise_for_verdicts(self._report)
        return self._report

    def _why_undecided(self, report: Report) -> str:
        calls = sum(isinstance(event, Call) for event in self._events)
        opened = [event.request.request_id for event in self._events if isinstance(event, Submit)]
        samples = sum(
            isinstance(event, Result) and event.rollout is not None for event in self._events
        )
        if not calls:
            return (
                f"No call reached the fake server at {self.url}. Give your client that address,"
                " which is also in ROLLPROOF_URL and, for the openai client, in OPENAI_BASE_URL."
            )
        if not samples:
            what = f"{calls} calls" if calls > 1 else "1 call"
            return (
                f"{what} reached the fake server, and no sample was reported: decorate the function"
                " that makes one with rollproof.http_clients.rollout, and give its client a"
                " hook of rollproof.http_clients."
                if not opened
                else f"{what} reached the fake server, and no rollout delivered a sample: each was"
                " dropped, ended with an error, or did not end."
            )
        if all(result.verdict is not Verdict.PASS for result in report.results):
            return "No check could be judged: `rollproof check -v` says why, of a saved trace."
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True
        try:
            self.stop()
        except TraceError as trouble:
            # it must not hide what the block raised
            if error is None:
                raise
            error.add_note(f"rollproof: {trouble}")
        if error is None:
            self.judge()
            if self.undecided:
                raise UsageError(self.undecided)


def _options(
    server: str, contract: Contract, flavour: str | None, more: Mapping[str, Any]
) -> ServeOptions:
    if server not in SERVERS:
        raise UsageError(f"There is no fake server {server!r}; choose one of {list(SERVERS)}.")
    flavours = [name for name in FLAVOURS if name.partition("-")[0] == server]
    if flavour is not None and flavour not in flavours:
        raise UsageError(f"flavour={show(flavour)} must be one of {flavours}.")
    valid = {field.name for field in fields(ServeOptions)} - {"flavour", "contract"}
    unknown = sorted(set(more) - valid)
    if unknown:
        raise UsageError(f"A fake server has no options {unknown}; it has {sorted(valid)}.")
    values = {"model": Model.of_contract(contract), **more}
    return ServeOptions(flavour=flavour or SERVERS[server][1], contract=contract, **values)


def _plan(plan: FaultPlan | Mapping[str, Any] | str | Path | None) -> FaultPlan | None:
    if plan is None or isinstance(plan, FaultPlan):
        return plan
    if isinstance(plan, Mapping):
        return FaultPlan.from_dict(plan)
    return FaultPlan.from_file(as_path(plan, "plan"))


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
