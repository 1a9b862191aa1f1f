"""Weights: what weight updates, pauses and caches may do to the samples in flight.

Checks of the weights that *served*; those of the update procedure itself are in ``updates``. Versions are compared as the
fakes count them (``Weights.version``, ``Reply.true_tokens``): labels belong to the family ``versions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.checks import Check, Collector, trace_check
from rollproof.contract import Contract, KvPolicy
from rollproof.invariants import updates
from rollproof.invariants.aborts import no_partial_flag
from rollproof.invariants.fold import Fold, case_option
from rollproof.records import FinishReason, Span, Version
from rollproof.trace import Abort, Admit, Call, Fault, Pause, PauseMode, Reply, Result, Resume, Submit, Weights

if TYPE_CHECKING:
    from rollproof.judge import JudgeContext

__all__ = ["CHECKS"]

_MIXED = "mixed"
_NO_TRUTH = "the trace does not say which weights really sampled (true_tokens): only rollproof's own engine knows"


class _NoAdmission(Fold):
    """A call may be sent to a paused server and be parked or refused; it must not run."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._paused: dict[str, Pause] = {}
        self._queued: dict[int, str] = {}

    def on_call(self, event: Call, out: Collector) -> None:
        self._queued[event.call_id] = event.server_id
        if event.server_id in self._paused:
            out.exercised("calls sent to a paused server")

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._queued.pop(event.call_id, None)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.setdefault(event.server_id, event)
        out.exercised("calls queued at a pause", sum(server == event.server_id for server in self._queued.values()))

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.pop(event.server_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what == "death" and event.server_id is not None:
            self._paused.pop(event.server_id, None)
            self._queued = {call: server for call, server in self._queued.items() if server != event.server_id}

    def on_admit(self, event: Admit, out: Collector) -> None:
        self._queued.pop(event.call_id, None)
        pause = self._paused.get(event.server_id)
        if pause is not None:
            out.finding(
                "a call was admitted by a paused server",
                expected=f"no admission between the pause at event {pause.index} and the resume of {event.server_id}",
                observed=f"call {event.call_id} was admitted at event {event.index}",
                where={"call": event.call_id, "server": event.server_id, "index": event.index},
                hint="A path around the admission gate (proxy workers not paused: AReaL #1618): the call runs while weights are replaced.",
            )


_no_admission = trace_check(
    "weights.no-admission-while-paused",
    promise="Between the acknowledgement of a pause and the resume, a server admits no call.",
    needs="Call, Admit, Pause and Resume events of the servers",
    exercised_by=("calls sent to a paused server", "calls queued at a pause"),
)(_NoAdmission)


class _NoToken(Fold):
    """Compares the number of sampled tokens at the pause with that at everything until the resume."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._frozen: dict[str, dict[int, int]] = {}
        self._mode: dict[str, PauseMode] = {}

    def on_pause(self, event: Pause, out: Collector) -> None:
        if event.server_id in self._frozen:
            self._compare(event.server_id, event.progress or {}, event.index, out)
            return
        self._mode[event.server_id] = event.mode
        self._frozen[event.server_id] = {call: count for call, count in (event.progress or {}).items() if count is not None}

    def on_weights(self, event: Weights, out: Collector) -> None:
        self._compare(event.server_id, event.progress or {}, event.index, out)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._compare(event.server_id, event.progress or {}, event.index, out)
        self._frozen.pop(event.server_id, None)

    def on_reply(self, event: Reply, out: Collector) -> None:
        for server, frozen in self._frozen.items():
            if event.call_id in frozen and not event.duplicate:
                self._compare(server, {event.call_id: len(event.output.token_ids)}, event.index, out)
                frozen.pop(event.call_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what == "death" and event.server_id is not None:
            self._frozen.pop(event.server_id, None)

    def _compare(self, server: str, progress: Iterable[int] | dict[int, int | None], index: int, out: Collector) -> None:
        frozen = self._frozen.get(server)
        if not frozen:
            return
        for call, now in dict(progress).items():
            before = frozen.get(call)
            if before is None or now is None:
                continue
            out.exercised("frozen calls")
            if now > before:
                frozen[call] = now
                out.finding(
                    "a call went on sampling while its server was paused",
                    expected=f"{before} tokens, as at the pause (mode {self._mode[server]})",
                    observed=f"{now} tokens at event {index}, before the resume",
                    where={"call": call, "server": server, "index": index},
                    hint="The pause does not reach every worker of the engine (sglang #24445), or was acknowledged before its step ended.",
                )


_no_token = trace_check(
    "weights.no-token-while-paused",
    promise="A call frozen by a pause samples no token until its server is resumed.",
    needs="progress of the calls in flight at Pause, and at Weights, Resume or the reply",
    exercised_by="frozen calls",
)(_NoToken)


@dataclass(slots=True)
class _Running:
    """A call in flight: its server, and the epoch of that server's weights at its first admission (else at its sending)."""

    server: str
    epoch: int
    admitted: bool = False


class _Serving(Fold):
    """Tracks, for each call, the weights that its server held from the call's admission on.

    An epoch is a set of equal versions: an identity update adds its version to the epoch before. Epoch 0 is what a
    server held before its first ``Weights`` event: unknown.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._epochs: dict[str, list[frozenset[Version]]] = {}
        self._updated: dict[str, int] = {}
        self._running: dict[int, _Running] = {}
        self._started = False

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def on_call(self, event: Call, out: Collector) -> None:
        self._running[event.call_id] = _Running(event.server_id, len(self._line(event.server_id)) - 1)

    def on_admit(self, event: Admit, out: Collector) -> None:
        call = self._running.get(event.call_id)
        if call is not None and not call.admitted:
            call.admitted = True
            call.epoch = len(self._line(call.server)) - 1

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded or event.version is None:
            return
        line = self._line(event.server_id)
        line.append(frozenset((event.version, *line[-1])) if event.identity else frozenset((event.version,)))
        if self._started and event.server_id not in self._updated:
            self._updated[event.server_id] = len(line) - 1

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what == "death":
            for call_id in [call_id for call_id, call in self._running.items() if call.server == event.server_id]:
                del self._running[call_id]
        elif event.what == "revive" and event.server_id is not None:
            # It may come back with whatever weights it started with: unknown until its next update.
            self._line(event.server_id).append(frozenset())

    def on_reply(self, event: Reply, out: Collector) -> None:
        call = self._running.pop(event.call_id, None)
        if call is None:
            return
        line = self._line(call.server)
        allowed = line[call.epoch :]
        if all(allowed):
            first = self._updated.get(call.server, len(line))
            self.served(event, call, allowed, call.epoch >= first, out)

    def served(self, reply: Reply, call: _Running, allowed: Sequence[frozenset[Version]], after: bool, out: Collector) -> None:
        """Judge one reply: ``allowed`` are the epochs from admission to reply, ``after`` whether an update came before it."""
        raise NotImplementedError

    def _line(self, server: str) -> list[frozenset[Version]]:
        line = self._epochs.get(server)
        if line is None:
            line = self._epochs[server] = [frozenset()]
        return line


class _ServedAfterUpdate(_Serving):
    """The versions of a call's tokens walk forward through the server's epochs, from the one at its admission."""

    def served(self, reply: Reply, call: _Running, allowed: Sequence[frozenset[Version]], after: bool, out: Collector) -> None:
        if not reply.output.token_ids:
            return
        if reply.true_tokens is None:
            out.absent(_NO_TRUTH)
            return
        if after:
            out.exercised("calls served after an update")
        at = 0
        for span in reply.true_tokens:
            if span.version is None or span.version == _MIXED:
                continue
            found = next((i for i in range(at, len(allowed)) if span.version in allowed[i]), None)
            if found is None:
                out.finding(
                    "tokens were sampled by weights that the server no longer had",
                    expected=f"version {_names(allowed[at:])} on {call.server}",
                    observed=f"tokens {span.start} to {span.end - 1} of call {reply.call_id} were sampled by version {span.version}",
                    where={"call": reply.call_id, "server": call.server, "version": span.version, "index": reply.index},
                    hint="The update was acknowledged before it took effect: a stale CUDA graph, an old adapter name, a worker left out.",
                )
                return
            at = found


_served_after_update = trace_check(
    "weights.served-after-update",
    promise="A call that a server admits after a weight update is sampled by the new weights.",
    needs="Weights events, and replies that say which weights sampled (true_tokens)",
    exercised_by="calls served after an update",
)(_ServedAfterUpdate)


def _keeps_kv(contract: Contract) -> str | None:
    return "the contract keeps the KV cache of older weights at an update" if contract.kv_policy is KvPolicy.KEEP else None


class _NoStaleCache(_Serving):
    """Rows and tokens come from forwards of one version each, none older than the weights at the call's admission."""

    def served(self, reply: Reply, call: _Running, allowed: Sequence[frozenset[Version]], after: bool, out: Collector) -> None:
        if reply.true_rows is None and reply.true_tokens is None:
            if reply.output.token_ids:
                out.absent(_NO_TRUTH)
            return
        if not call.admitted or not (reply.true_rows or reply.true_tokens):
            return
        if case_option(self.context, "clear_cache") is False:
            out.absent("the case asks its syncs not to clear the cache")
            return
        if after:
            out.exercised("calls admitted after an update")
        if len(allowed) > 1:
            out.exercised("calls in flight during an update")
        good = frozenset().union(*allowed)
        for what, spans in (("rows", reply.true_rows), ("tokens", reply.true_tokens)):
            stale = _first_stale(spans or (), good, what)
            if stale is not None:
                out.finding(
                    f"{what} of a call were computed from KV of older weights",
                    expected=f"every one computed by version {_names(allowed)} alone on {call.server}",
                    observed=f"{what} {stale.start} to {stale.end - 1} of call {reply.call_id}: version {stale.version}"
                    + (f", {reply.output.cached_tokens} prompt tokens from the prefix cache" if reply.output.cached_tokens else ""),
                    where={"call": reply.call_id, "server": call.server, "version": stale.version, "index": reply.index},
                    hint="The prefix cache was not reset at the update (NeMo-RL #4018, SkyRL #2246), or the reset was refused "
                    "while calls ran (NeMo-RL #3929). If the stack means to keep it, declare kv_policy='keep'.",
                )
                return


_no_stale_cache = trace_check(
    "weights.no-stale-cache",
    promise="After an update no forward reads KV that older weights wrote (kv_policy=recompute).",
    needs="replies that say which weights computed their rows and tokens (true_rows, true_tokens)",
    exercised_by=("calls admitted after an update", "calls in flight during an update"),
    applies=_keeps_kv,
)(_NoStaleCache)


def _first_stale(spans: Iterable[Span], good: frozenset[Version], what: str) -> Span | None:
    """The first span that mixes versions or, for rows, is of none of the good ones (tokens: ``served-after-update`` judges that)."""
    for span in spans:
        if span.version == _MIXED or (what == "rows" and span.version is not None and span.version not in good):
            return span
    return None


def _names(epochs: Iterable[frozenset[Version]]) -> str:
    return " then ".join("/".join(str(version) for version in sorted(epoch, key=str)) for epoch in epochs)


class _LabelOnly(Fold):
    """An abort of everything at the instant of the label is the label's, unless it opens a pause or a load."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._flying: dict[int, str] = {}
        self._sweep: dict[str, Abort] = {}
        self._label: dict[str, Weights] = {}
        self._suspect: dict[int, Weights] = {}
        self._hit: dict[str, list[tuple[Reply, Weights]]] = {}

    def on_call(self, event: Call, out: Collector) -> None:
        self._flying[event.call_id] = event.server_id

    def on_abort(self, event: Abort, out: Collector) -> None:
        if event.wanted == "*":
            self._sweep[event.server_id] = event
            self._suspects(event.server_id)

    def on_weights(self, event: Weights, out: Collector) -> None:
        if event.loaded:
            self._clear(event.server_id)
            return
        out.exercised("calls in flight when only a label was published", sum(s == event.server_id for s in self._flying.values()))
        self._label[event.server_id] = event
        self._suspects(event.server_id)

    def _suspects(self, server: str) -> None:
        label, sweep = self._label.get(server), self._sweep.get(server)
        if label is not None and sweep is not None and label.time == sweep.time:
            self._suspect.update((call, label) for call in sweep.call_ids if call in self._flying)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._clear(event.server_id)

    def on_admit(self, event: Admit, out: Collector) -> None:
        self._blame(event.server_id, out)

    def on_reply(self, event: Reply, out: Collector) -> None:
        server = self._flying.pop(event.call_id, None)
        label = self._suspect.pop(event.call_id, None)
        if server is not None and label is not None and event.output.finish_reason is FinishReason.ABORT:
            self._hit.setdefault(server, []).append((event, label))

    def finish(self, out: Collector) -> None:
        for server in list(self._hit):
            self._blame(server, out)

    def _clear(self, server: str) -> None:
        self._hit.pop(server, None)
        self._suspect = {call: label for call, label in self._suspect.items() if label.server_id != server}
        self._sweep.pop(server, None)

    def _blame(self, server: str, out: Collector) -> None:
        for reply, label in self._hit.pop(server, ()):
            out.finding(
                "publishing a version label aborted a call",
                expected=f"call {reply.call_id} goes on: only the label {label.label!r} was published, no weights were loaded",
                observed=f"it ended with finish reason abort after {len(reply.output.token_ids)} tokens",
                where={"call": reply.call_id, "server": server, "index": reply.index},
                hint="The label's endpoint aborts everything in flight by default: pass abort_all_requests=False (miles #2372, #2589).",
            )


_label_only = trace_check(
    "weights.label-only-keeps-calls",
    promise="Publishing a version label alone aborts nothing that is in flight.",
    needs="Weights events with loaded=False, and the Abort events of the servers",
    exercised_by="calls in flight when only a label was published",
)(_LabelOnly)


class _Staleness(Fold):
    """Counts published updates between a sample's oldest trained token and the newest weights that all live servers hold."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._rank: dict[Version, int] = {}
        self._held: dict[str, int] = {}

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded or event.version is None or (event.label is None and event.version not in self._rank):
            return
        if event.identity and event.server_id in self._held:
            self._rank.setdefault(event.version, self._held[event.server_id])
        self._held[event.server_id] = self._rank.setdefault(event.version, max(self._rank.values(), default=-1) + 1)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what == "death" and event.server_id is not None:
            self._held.pop(event.server_id, None)

    def on_result(self, event: Result, out: Collector) -> None:
        view = self.context.open.get(event.request_id)
        bound = self.context.contract.max_staleness
        if view is None or event.rollout is None or bound is None or not self._held:
            return
        newest = min(self._held.values())
        mask = event.rollout.loss_mask
        tokens = view.stitched.tokens[: len(event.rollout.response_ids)]
        trained = [token for i, token in enumerate(tokens) if token.attempt >= 0 and (mask is None or i >= len(mask) or mask[i])]
        ranks = [self._rank[version] for version in (t.true if t.true is not None else t.shown for t in trained) if version in self._rank]
        if not ranks:
            return
        age = newest - min(ranks)
        if age > 0:
            out.exercised("samples older than the newest weights")
        if age > bound:
            oldest = next(version for version, rank in self._rank.items() if rank == min(ranks))
            out.finding(
                "a delivered sample is too old",
                expected=f"at most {bound} updates behind the newest weights",
                observed=f"its oldest trained token was sampled by version {oldest}, {age} updates behind",
                where={"request": event.request_id, "version": oldest, "index": event.index},
                hint="The oldest token decides, not the last version or the one at the start (verl #7569, prime-rl #1764).",
            )


_staleness = trace_check(
    "weights.staleness-bound",
    promise="No token of a delivered sample is older than max_staleness weight updates at delivery.",
    needs="Weights events with labels, and the versions that sampled each token",
    exercised_by="samples older than the newest weights",
    applies=lambda contract: None if contract.max_staleness is not None else "the contract promises no staleness bound",
)(_Staleness)


class _OneVersion(Fold):
    """Calls that a pause froze across the update are excused: who chose that pause chose mixed samples."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._off = case_option(context, "partial") is False
        self._freezing: set[str] = set()
        self._loaded_frozen: set[tuple[str, Version]] = set()
        self._held: dict[str, Version] = {}
        self._same: dict[Version, Version] = {}

    def on_pause(self, event: Pause, out: Collector) -> None:
        if event.mode in (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE):
            self._freezing.add(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._freezing.discard(event.server_id)

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded:
            return
        if event.identity and event.server_id in self._held:
            self._same.setdefault(event.version, self._held[event.server_id])
        self._held[event.server_id] = self._same.get(event.version, event.version)
        if event.server_id in self._freezing:
            self._loaded_frozen.add((event.server_id, event.version))

    def on_result(self, event: Result, out: Collector) -> None:
        view = self.context.open.get(event.request_id)
        if not self._off or view is None or event.rollout is None:
            return
        tokens = view.stitched.tokens
        if not any(token.true is not None for token in tokens):
            out.absent(_NO_TRUTH)
            return
        out.exercised("samples delivered with partial rollout off")
        before = None
        for i, token in enumerate(tokens):
            if token.attempt < 0 or token.true in (None, _MIXED):
                before = None if token.attempt < 0 else before
                continue
            if before is not None and self._class(before.true) != self._class(token.true):
                server = view.attempts[token.attempt].call.server_id
                if before.attempt != token.attempt or (server, token.true) not in self._loaded_frozen:
                    out.finding(
                        "a sample mixes weight versions although partial rollout is off",
                        expected=f"version {before.true} for the whole turn",
                        observed=f"response token {i} was sampled by version {token.true}",
                        where=view.where(
                            position=len(view.request.prompt_ids) + i, version=token.true, call=view.attempts[token.attempt].call.call_id
                        ),
                        hint="A call was still in flight, or was resumed, across the update: drain or drop it first (labs-molt #124).",
                    )
                    return
            before = token

    def _class(self, version: Version) -> Version:
        return self._same.get(version, version)


_one_version = trace_check(
    "weights.one-version-per-sample",
    promise="With partial rollout off, every turn of a delivered sample is sampled by one weight version.",
    needs="a case with partial=False, and replies that say which weights sampled (true_tokens)",
    exercised_by="samples delivered with partial rollout off",
    applies=no_partial_flag,
)(_OneVersion)


CHECKS: tuple[Check, ...] = (
    _no_admission,
    _no_token,
    _served_after_update,
    _no_stale_cache,
    _label_only,
    _staleness,
    _one_version,
    *updates.CHECKS,
)
"""The family ``weights``, in the order of a report."""
