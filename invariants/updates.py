"""Updates: the procedure that brings new weights to the servers, judged by its pauses, loads and resumes (family ``weights``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollproof.checks import Check, Collector, request_check, trace_check
from rollproof.contract import Logprobs
from rollproof.invariants.fold import Ending, Fold, case_actions
from rollproof.records import Version
from rollproof.trace import Call, Event, Fault, Pause, Resume, Submit, Weights
from rollproof.view import RequestView

if TYPE_CHECKING:
    from rollproof.judge import JudgeContext

__all__ = ["CHECKS"]


class _EveryReplica(Ending):
    """Replicas may differ during an update, and while a death, a failed update or a declared skew explains it."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._held: dict[str, frozenset[Version]] = {}
        self._paused: set[str] = set()
        self._started = False
        self._latest: Weights | None = None
        self._excuse: str | None = None
        self._skewed = {action["server"] for action in case_actions(context, "skew")}

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def on_call(self, event: Call, out: Collector) -> None:
        self._held.setdefault(event.server_id, frozenset())

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._held.setdefault(event.server_id, frozenset())
        self._paused.add(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.discard(event.server_id)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what in ("death", "revive", "update-failure"):
            self._excuse = f"a {event.what} came after the last update that reached every replica"
        if event.server_id is not None and event.what == "death":
            self._held.pop(event.server_id, None)
            self._paused.discard(event.server_id)
        elif event.server_id is not None and event.what == "revive":
            self._held.setdefault(event.server_id, frozenset())

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded or event.version is None:
            return
        before = self._held.get(event.server_id, frozenset())
        self._held[event.server_id] = before | {event.version} if event.identity else frozenset((event.version,))
        self._latest = event
        if not self._behind():
            self._excuse = None
            if self._started and len(self._held) > 1:
                out.exercised("updates of several replicas")

    def _behind(self) -> list[str]:
        latest = self._latest
        return [] if latest is None else [server for server, held in self._held.items() if latest.version not in held]

    def finish(self, out: Collector) -> None:
        behind = self._behind()
        if not behind or self._latest is None:
            return
        ahead = [server for server in self._held if server not in behind]
        if len(ahead) == 1 and (ahead[0] in self._skewed or None in self._skewed):
            out.absent("a declared skew is the reason why the replicas differ")
        elif self._excuse or self._paused or not self.complete:
            out.absent(self._excuse or "the trace ends in the middle of an update")
        else:
            for server in behind:
                held = "/".join(sorted(map(str, self._held[server]))) or "whatever it started with"
                out.finding(
                    "an update left a replica out",
                    expected=f"version {self._latest.version} on all of {sorted(self._held)}",
                    observed=f"{server} still holds {held}",
                    where={"server": server, "version": self._latest.version, "index": self._latest.index},
                    hint="Its samples come from older weights, whatever tag it shows: check the list of replicas that the update walks.",
                )


_every_replica = trace_check(
    "weights.every-replica-updated",
    promise="When a weight update has ended, every live replica holds the new weights.",
    needs="Weights events of two or more servers, in a trace that runs to its end",
    exercised_by="updates of several replicas",
)(_EveryReplica)


class _EveryPause(Ending):
    """Pauses that a failed update left behind are ``failed-update-resumes``'s to judge."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._paused: dict[str, Pause] = {}
        self._failed: set[str] = set()
        self._waiting: dict[str, set[str]] = {}

    def on_call(self, event: Call, out: Collector) -> None:
        if event.server_id in self._paused:
            self._waiting.setdefault(event.server_id, set()).add(event.request_id)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.setdefault(event.server_id, event)

    def on_resume(self, event: Resume, out: Collector) -> None:
        if self._paused.pop(event.server_id, None) is not None:
            out.exercised("pauses")
        self._failed.discard(event.server_id)
        self._waiting.pop(event.server_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what == "update-failure":
            self._failed.update(self._paused)
        elif event.what == "death" and event.server_id is not None:
            self._paused.pop(event.server_id, None)

    def finish(self, out: Collector) -> None:
        for server, pause in self._paused.items():
            stuck = sorted(self._waiting.get(server, set()).intersection(self.hung))
            if server in self._failed:
                continue
            if not self.complete and not stuck:
                out.absent("the trace ends while a server is paused, and may have been cut there")
                continue
            out.finding(
                "a server was never resumed",
                expected=f"a resume of {server} after its pause (mode {pause.mode}) at event {pause.index}",
                observed="none until the end of the trace" + (f"; requests {stuck} hang on it" if stuck else ""),
                where={"server": server, "index": pause.index},
            )


_every_pause = trace_check(
    "weights.every-pause-resumes",
    promise="Every pause of a server ends with a resume.",
    needs="Pause and Resume events, in a trace that runs to its end or hangs",
    exercised_by="pauses",
)(_EveryPause)


class _FailedUpdate(Ending):
    """The resume must come from the failed update itself: the next one finding the server still paused is too late."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._paused: dict[str, Pause] = {}
        self._failed: dict[str, Fault] = {}

    def on_pause(self, event: Pause, out: Collector) -> None:
        failure = self._failed.pop(event.server_id, None)
        if failure is not None:
            self._blame(event.server_id, failure, f"it was still paused when the next update began, at event {event.index}", out)
        self._paused[event.server_id] = event

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.pop(event.server_id, None)
        if self._failed.pop(event.server_id, None) is not None:
            out.exercised("servers paused when an update failed")

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what == "update-failure":
            self._failed.update(dict.fromkeys(self._paused, event))
        elif event.what == "death" and event.server_id is not None:
            self._paused.pop(event.server_id, None)
            self._failed.pop(event.server_id, None)

    def finish(self, out: Collector) -> None:
        for server, failure in self._failed.items():
            if self.complete or self.hung:
                tail = f"; requests {sorted(self.hung)} hang" if self.hung else ""
                self._blame(server, failure, f"it was still paused at the end of the trace{tail}", out)
            else:
                out.absent("the trace ends after a failed update, and may have been cut there")

    def _blame(self, server: str, failure: Fault, observed: str, out: Collector) -> None:
        out.finding(
            "a failed update left a replica paused",
            expected=f"{server} is resumed when the update fails at event {failure.index} ({failure.detail or 'transfer failed'})",
            observed=observed,
            where={"server": server, "index": failure.index},
            hint="Resume in a `finally` (verl CheckpointEngineManager.update_weights has none): until then clients park or retry. "
            "If your trainer always retries a failed update at once, list this check as an expected failure with that reason.",
        )


_failed_update = trace_check(
    "weights.failed-update-resumes",
    promise="A weight update that fails leaves no replica paused.",
    needs="an update that fails (Fault update-failure) while servers are paused",
    exercised_by="servers paused when an update failed",
)(_FailedUpdate)


class _Nesting(Fold):
    """Two pauses, a resume, a load into the serving server and another resume: the first resume cut into the second update."""

    @dataclass(slots=True)
    class _Server:
        paused: bool = False
        pauses: int = 0
        loaded: Event | None = None
        resume: Event | None = None

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._servers: dict[str, _Nesting._Server] = {}
        self._loads: dict[str, int] = {}
        self._twice = bool(case_actions(context, "sync-twice"))
        self._started = False

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def _server(self, name: str) -> _Server:
        if name not in self._servers:
            self._servers[name] = self._Server()
        return self._servers[name]

    def on_pause(self, event: Pause, out: Collector) -> None:
        server = self._server(event.server_id)
        if not server.paused:
            server.pauses, server.loaded, server.resume = 0, None, None
        else:
            out.exercised("updates started at once")
        server.paused = True
        server.pauses += 1

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded:
            return
        server = self._server(event.server_id)
        if not server.paused and server.pauses:
            server.loaded = event
        if self._started:
            self._loads[event.server_id] = self._loads.get(event.server_id, 0) + 1

    def on_resume(self, event: Resume, out: Collector) -> None:
        server = self._server(event.server_id)
        loaded, cut = server.loaded, server.resume
        if not server.paused and loaded is not None and cut is not None:
            out.finding(
                "two updates at once cut into each other",
                expected=f"{event.server_id} stays paused until both updates have loaded their weights",
                observed=f"paused twice, resumed at event {cut.index}, loaded at event {loaded.index} while serving, "
                f"resumed again at event {event.index}",
                where={"server": event.server_id, "index": cut.index},
                hint="Updates need a lock or a count of pauses: the first resume served from weights that the other was loading.",
            )
            server.loaded = None
        server.paused = False
        server.pauses = max(0, server.pauses - 1)
        server.resume = event if server.pauses else None

    def finish(self, out: Collector) -> None:
        if self._twice:
            out.exercised("updates started at once", sum(loads > 1 for loads in self._loads.values()))


_nesting = trace_check(
    "weights.updates-do-not-interleave",
    promise="Of two updates at once, none resumes a server that the other has paused and not yet loaded.",
    needs="Pause, Weights and Resume events of two updates that overlap",
    exercised_by="updates started at once",
)(_Nesting)


class _OneLoad(Fold):
    """Reloads that repair something (after a death or a failed update), of equal weights, or of an older version are no faults."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._held: dict[str, Weights] = {}
        self._started = False

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what in ("death", "revive", "update-failure"):
            self._held.clear()

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not self._started or not event.loaded:
            return
        if event.identity or event.version is None:
            self._held.pop(event.server_id, None)
            return
        out.exercised("loads")
        before = self._held.get(event.server_id)
        self._held[event.server_id] = event
        if before is not None and before.version == event.version:
            out.finding(
                "a server loaded the same version twice",
                expected=f"one load of version {event.version} by {event.server_id}",
                observed=f"loads at events {before.index} and {event.index}",
                where={"server": event.server_id, "version": event.version, "index": event.index},
                hint="A cancelled or retried update ran again although the first one had done its work (prime-rl #2004).",
            )


_one_load = trace_check(
    "weights.one-load-per-version",
    promise="A server loads each version once.",
    needs="Weights events",
    exercised_by="loads",
)(_OneLoad)


@request_check(
    "weights.identity-update-changes-nothing",
    promise="An update to equal weights changes no value that the engine returns.",
    needs="an oracle, and logprobs of a request that saw an identity update and no other",
    exercised_by="replies after an identity update",
)
def _identity(view: RequestView, out: Collector) -> None:
    """Logprobs of every reply equal the oracle's under the weights from before the update."""
    if view.oracle is None or not view.history.updates or not any(update.identity for update in reversed(view.history.updates)):
        return
    for attempt in view.attempts:
        reply = attempt.consumed
        version = _unchanged(view.history.updates, view, attempt.call.server_id)
        if reply is None or version is None or not len(reply.output.token_ids) or not _raw(view):
            continue
        given = reply.output.logprobs
        if given is None or len(given) != len(reply.output.token_ids):
            continue
        ids = (*attempt.call.prompt_ids, *reply.output.token_ids)
        want = view.oracle.logprobs(version, ids, len(attempt.call.prompt_ids))
        out.exercised("replies after an identity update")
        wrong = np.flatnonzero(~np.isnan(given) & ~np.isclose(given, want, atol=1e-4))
        if len(wrong):
            out.finding(
                "an update to equal weights changed what the engine returns",
                expected=f"logprob {want[wrong[0]]:.4f}, that of version {version}",
                observed=f"logprob {given[wrong[0]]:.4f} at token {wrong[0]} of the call ({len(wrong)} of {len(given)} tokens differ)",
                where=view.where(call=attempt.call.call_id, version=version),
                hint="The load is not repeatable (sglang #14178, vLLM reload), or KV of before the update is used after it.",
            )


def _unchanged(updates: Sequence[Weights], view: RequestView, server: str) -> Version:
    """The weights that ``server`` held all through the request, with at least one identity update in it; else ``None``."""
    seen = False
    for update in reversed(updates):
        if update.server_id != server or not update.loaded:
            continue
        inside = update.index > view.submit.index
        if inside and not update.identity:
            return None
        if not inside:
            return update.version if seen else None
        seen = True
    return None


def _raw(view: RequestView) -> bool:
    """Whether logprobs are of the unscaled distribution, which is what an oracle gives."""
    engine = view.engine or view.contract
    return engine.logprobs is Logprobs.RAW or view.request.sampling.get("temperature") in (None, 1, 1.0)


CHECKS: tuple[Check, ...] = (
    _every_replica,
    _every_pause,
    _failed_update,
    _nesting,
    _one_load,
    _identity,
)
"""The checks of this module, in the order of a report."""
