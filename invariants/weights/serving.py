"""Checks on which weights and which KV cache a call may be sampled with, around a weight update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rollproof.core.contract import Contract, KvPolicy, Logprobs
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import (
    Admit,
    Call,
    Fault,
    Pause,
    Reply,
    Resume,
    Submit,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import Span, Version
from rollproof.invariants._shared.event_check import EventCheck, case_option, remember
from rollproof.judging.checks import Check, Collector, request_check, trace_check
from rollproof.judging.request_view import RequestView

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "ALTERED",
    "MIXED",
    "NO_TRUTH",
    "weights_identity_update_changes_nothing",
    "weights_no_stale_cache",
    "weights_served_after_update",
]

MIXED = "mixed"
"""The version of values that were computed over KV of several versions."""
ALTERED = "altered"
"""The version of values that the weights of no version give: ``weights.adapter-applied`` and
``weights.delta-base`` judge how they came about.
"""
NO_TRUTH = (
    "the trace does not say which weights really sampled (true_tokens): only rollproof's fake"
    " engine knows"
)


_Place: TypeAlias = "tuple[str, str | None]"
"""What weights are loaded into: a server and the name of an adapter, or ``None`` for the model."""


@dataclass(slots=True)
class _Running:
    """A call in flight: its server, what serves it there, and the epoch of those weights at its
    first admission (before it, when it was sent).
    """

    place: _Place
    epoch: int
    admitted: bool = False

    @property
    def server(self) -> str:
        """Its server."""
        return self.place[0]


@dataclass(frozen=True, slots=True)
class _Load:
    """How an epoch began: the load, and the pause under which it came (``None``: the server was
    serving).
    """

    event: Weights
    pause: Pause | None


class _Serving(EventCheck):
    """Tracks for each call the weights that its server held from the call's admission on, in the
    adapter that the call names if it names one.

    An epoch is a set of equal versions: an identity update adds its version to the previous epoch.
    Epoch 0 is what a server held before its first ``Weights`` event: unknown.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._epochs: dict[_Place, list[frozenset[Version]]] = {}
        self._updated: dict[_Place, int] = {}
        self._running: dict[int, _Running] = {}
        self._started = False
        self._updates = 0
        self._restarted: set[str] = set()
        self._pauses: dict[str, Pause] = {}
        self._loads: dict[tuple[_Place, int], _Load] = {}

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def on_call(self, event: Call, out: Collector) -> None:
        place = (event.server_id, event.adapter)
        remember(self._running, event.call_id, _Running(place, len(self._epochs_of(place)) - 1))

    def on_admit(self, event: Admit, out: Collector) -> None:
        call = self._running.get(event.call_id)
        if call is not None and not call.admitted:
            call.admitted = True
            # The first admission counts: a preempted call is admitted again and may go on under
            # newer weights.
            call.epoch = len(self._epochs_of(call.place)) - 1

    def on_update(self, event: Update, out: Collector) -> None:
        self._updates += 1 if event.phase is UpdatePhase.ASKED else -1
        if not self._updates:
            self._restarted.clear()

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._restarted.discard(event.server_id)
        self._pauses[event.server_id] = event

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._pauses.pop(event.server_id, None)

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded or event.version is None:
            return
        place = (event.server_id, event.adapter)
        epochs = self._epochs_of(place)
        if event.server_id in self._restarted and not event.by_harness:
            # The update paused the server before it died. Its cache holds KV that no update could
            # foresee, so that nothing can be said until the next load.
            epochs.append(frozenset())
        elif event.identity:
            epochs.append(frozenset((event.version, *epochs[-1])))
        else:
            epochs.append(frozenset((event.version,)))
        load = _Load(event, self._pauses.get(event.server_id))
        remember(self._loads, (place, len(epochs) - 1), load)
        if self._started and place not in self._updated:
            self._updated[place] = len(epochs) - 1

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what == "death":
            for call_id in [
                call_id for call_id, call in self._running.items() if call.server == event.server_id
            ]:
                # The calls of a dead server get no reply, or one that says nothing about its
                # weights.
                del self._running[call_id]
            self._pauses.pop(event.server_id or "", None)
        elif event.what == "revive" and event.server_id is not None:
            # It may come back with whatever weights it started with: unknown until its next update.
            for place in {(event.server_id, None), *self._epochs}:
                if place[0] == event.server_id:
                    self._epochs_of(place).append(frozenset())
            if self._updates:
                self._restarted.add(event.server_id)

    def on_reply(self, event: Reply, out: Collector) -> None:
        call = self._running.pop(event.call_id, None)
        if call is None:
            return
        epochs = self._epochs_of(call.place)
        allowed = epochs[call.epoch :]
        # An empty epoch is unknown weights (start-up, revival): nothing can be said about the call.
        if all(allowed):
            # Loads before the first request are the start-up, not an update.
            first = self._updated.get(call.place, len(epochs))
            self.judge_reply(event, call, allowed, call.epoch >= first, out)

    def judge_reply(
        self,
        reply: Reply,
        call: _Running,
        allowed: Sequence[frozenset[Version]],
        after: bool,
        out: Collector,
    ) -> None:
        """Judge one reply.

        Args:
            reply: The reply.
            call: Its call.
            allowed: The epochs from admission to reply.
            after: Whether an update came before the admission.
            out: Takes the findings.
        """
        raise NotImplementedError(f"{type(self).__name__} must judge the replies that it is shown")

    def _epochs_of(self, place: _Place) -> list[frozenset[Version]]:
        epochs = self._epochs.get(place)
        if epochs is None:
            epochs = self._epochs[place] = [frozenset()]
        return epochs


class WeightsServedAfterUpdate(_Serving):
    """The versions of a call's tokens go forward through the server's epochs, from the one at its
    admission.
    """

    def judge_reply(
        self,
        reply: Reply,
        call: _Running,
        allowed: Sequence[frozenset[Version]],
        after: bool,
        out: Collector,
    ) -> None:
        if not reply.output.token_ids:
            return
        if reply.true_tokens is None:
            out.absent(NO_TRUTH)
            return
        if after:
            out.exercised("calls served after an update")
        position = 0
        # A call may cross several updates, but never back: a stale CUDA graph or adapter shows as a
        # step back.
        for span in reply.true_tokens:
            if span.version in (None, MIXED, ALTERED):
                continue
            epoch = next(
                (i for i in range(position, len(allowed)) if span.version in allowed[i]), None
            )
            if epoch is None:
                out.finding(
                    "tokens were sampled by weights that the server no longer had",
                    expected=f"version {_epoch_names(allowed[position:])} on {call.server}",
                    observed=(
                        f"tokens {span.start} to {span.end - 1} of call {reply.call_id} were"
                        f" sampled by version {span.version}"
                    ),
                    where={
                        "call": reply.call_id,
                        "server": call.server,
                        "version": span.version,
                        "index": reply.index,
                    },
                    hint=(
                        "The update was acknowledged before it took effect: a stale CUDA"
                        " graph, an old adapter name, or a worker that was left out."
                    ),
                )
                return
            position = epoch


weights_served_after_update: Check = trace_check(
    "weights.served-after-update",
    promise="A call that a server admits after a weight update is sampled by the new weights.",
    needs="Weights events, and replies that say which weights sampled (true_tokens)",
    exercised_by="calls served after an update",
)(WeightsServedAfterUpdate)


def _keeps_kv(contract: Contract) -> str | None:
    return (
        "the contract keeps the KV cache of older weights at an update"
        if contract.kv_policy is KvPolicy.KEEP
        else None
    )


class WeightsNoStaleCache(_Serving):
    """Rows and tokens come from forward passes of one version each, none older than the weights at
    the call's admission.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._foreign: set[str] = set()

    def judge_reply(
        self,
        reply: Reply,
        call: _Running,
        allowed: Sequence[frozenset[Version]],
        after: bool,
        out: Collector,
    ) -> None:
        if reply.true_rows is None and reply.true_tokens is None:
            if reply.output.token_ids:
                out.absent(NO_TRUTH)
            return
        if not call.admitted or not (reply.true_rows or reply.true_tokens):
            return
        header = self.context.header
        if (
            # The case itself keeps the cache, so stale KV is what it asked for.
            case_option(header, "clear_cache") is False
            or case_option(header, "pause_mode") == PauseMode.IN_PLACE
        ):
            out.absent("the case tells its weight syncs not to clear the cache")
            return
        held = self._epochs_of(call.place)[: call.epoch + len(allowed)]
        # What weights computed that the server never had is not a matter of its cache.
        known = None if not all(held[1:]) else frozenset().union(*held)
        spans = [*(reply.true_rows or ()), *(reply.true_tokens or ())]
        if known is not None and any(
            span.version not in known and span.version not in (None, MIXED, ALTERED)
            for span in spans
        ):
            self._foreign.add(call.server)
        if call.server in self._foreign:
            out.absent("the server computed with weights that it was never given")
            return
        if after:
            out.exercised("calls admitted after an update")
        if len(allowed) > 1:
            out.exercised("calls in flight during an update")
        allowed_versions = frozenset().union(*allowed)
        cached = reply.output.cached_tokens
        for kind, of_kind in (("rows", reply.true_rows), ("tokens", reply.true_tokens)):
            stale = _first_stale(of_kind or (), allowed_versions, 0 if kind == "tokens" else cached)
            if stale is not None:
                out.finding(
                    f"{kind} of a call were computed from KV of older weights",
                    expected=(
                        f"all computed by version {_epoch_names(allowed)} alone on {call.server}"
                    ),
                    observed=(
                        f"{kind} {stale.start} to {stale.end - 1} of call {reply.call_id}: version"
                        f" {stale.version}"
                    )
                    + (
                        f", {reply.output.cached_tokens} prompt tokens from the prefix cache"
                        if reply.output.cached_tokens
                        else ""
                    ),
                    where={
                        "call": reply.call_id,
                        "server": call.server,
                        "version": stale.version,
                        "index": reply.index,
                    },
                    hint=self._hint(call, allowed, stale)
                    + " If the stack keeps it on purpose, declare kv_policy='keep'.",
                )
                return

    def _hint(self, call: _Running, allowed: Sequence[frozenset[Version]], stale: Span) -> str:
        """Return what the load that replaced the older weights says about how their KV was kept."""
        epochs = self._epochs_of(call.place)
        if stale.version != MIXED:
            older = [i for i, epoch in enumerate(epochs[: call.epoch]) if stale.version in epoch]
            replaced = older[-1] + 1 if older else call.epoch
        else:
            replaced = call.epoch + (len(allowed) > 1)
        load = self._loads.get((call.place, replaced))
        if load is None:
            return "KV of older weights outlived an update."
        event, pause = load.event, load.pause
        if pause is None:
            return (
                f"The weights arrived at event {event.index}, while the server was serving: no"
                " pause came before, or the transfer outlasted it. Resume after the transfer, and"
                " reset the cache before that."
            )
        if not pause.clear_cache:
            return (
                f"The pause at event {pause.index} kept the cache, and KV of older weights was used"
                " after the resume: reset the cache in between, that of running calls included"
                " (NeMo-RL #4018, SkyRL #2246). A reset before the pause is too early: calls run."
            )
        return (
            f"The pause at event {pause.index} was to clear the cache, and KV of older weights"
            " survived: the reset was refused while calls ran (NeMo-RL #3929), or did not reach the"
            " running calls."
        )


weights_no_stale_cache: Check = trace_check(
    "weights.no-stale-cache",
    promise=(
        "After an update no forward pass reads KV that older weights wrote (kv_policy=recompute)."
    ),
    needs="replies that say which weights computed their rows and tokens (true_rows, true_tokens)",
    exercised_by=("calls admitted after an update", "calls in flight during an update"),
    applies=_keeps_kv,
)(WeightsNoStaleCache)


def _first_stale(
    spans: Iterable[Span], allowed_versions: frozenset[Version], cached: int | None
) -> Span | None:
    """Return the first span that mixes versions or, in the ``cached`` part (``None``: anywhere), is
    of none of the allowed ones.
    """
    for span in spans:
        # weights.served-after-update judges what old weights computed without a cache.
        inside = cached is None or span.start < cached
        if span.version == MIXED or (
            inside and span.version not in (None, ALTERED) and span.version not in allowed_versions
        ):
            return span
    return None


def _epoch_names(epochs: Iterable[frozenset[Version]]) -> str:
    return " then ".join(
        "/".join(str(version) for version in sorted(epoch, key=str)) for epoch in epochs
    )


@request_check(
    "weights.identity-update-changes-nothing",
    promise="An update to equal weights changes no value that the engine returns.",
    needs="an oracle, and logprobs of a request that saw an identity update and no other",
    exercised_by="replies after an identity update",
    applies=lambda contract: (
        "the contract declares logprobs='none'" if contract.logprobs is Logprobs.NONE else None
    ),
)
def weights_identity_update_changes_nothing(view: RequestView, out: Collector) -> None:
    """Compare the logprobs of every reply with the oracle's under the weights from before the
    update.
    """
    if view.oracle is None:
        return
    for attempt in view.attempts:
        reply = attempt.consumed
        place = (attempt.call.server_id, attempt.call.adapter)
        version = _unchanged(view.history.updates, view, place)
        if (
            reply is None
            or version is None
            or not len(reply.output.token_ids)
            or not _unscaled(view)
        ):
            continue
        logprobs = reply.output.logprobs
        if logprobs is None or len(logprobs) != len(reply.output.token_ids):
            continue
        earlier = {
            update.version
            for update in view.history.updates
            if (update.server_id, update.adapter) == place
        } - {version}
        # Kept KV of older weights changes logprobs by design (kv_policy=keep).
        if any(span.version in earlier for span in reply.true_rows or ()):
            out.absent(
                "the cache still held KV of other weights: the reply is not that of the"
                " weights that the update reloaded"
            )
            continue
        ids = (*attempt.call.prompt_ids, *reply.output.token_ids)
        expected = view.oracle.logprobs(version, ids, len(attempt.call.prompt_ids))
        out.exercised("replies after an identity update")
        wrong = np.flatnonzero(~np.isnan(logprobs) & ~np.isclose(logprobs, expected, atol=1e-4))
        if len(wrong):
            out.finding(
                "an update to equal weights changed what the engine returns",
                expected=f"logprob {expected[wrong[0]]:.4f}, that of version {version}",
                observed=(
                    f"logprob {logprobs[wrong[0]]:.4f} at token {wrong[0]} of the call"
                    f" ({len(wrong)} of {len(logprobs)} tokens differ)"
                ),
                where=view.place(call=attempt.call.call_id, version=version),
                hint=(
                    "The load is not repeatable (sglang #14178, vLLM reload), or KV from"
                    " before the update is used after it."
                ),
            )


def _unchanged(updates: Sequence[Weights], view: RequestView, place: _Place) -> Version:
    """Return the weights that ``place`` held throughout the request with at least one identity
    update in it, otherwise ``None``.

    An update that ended without a load, since the stack knows that its weights are those that the
    server has, is one as well.
    """
    load = next(
        (u for u in reversed(updates) if (u.server_id, u.adapter) == place and u.loaded), None
    )
    updated = load is not None and any(
        update.version == load.version and update.index > view.submit.index and begun > load.index
        for begun, update in reversed(view.history.ended)
    )
    for update in reversed(updates):
        if (update.server_id, update.adapter) != place or not update.loaded:
            continue
        inside = update.index > view.submit.index
        if inside and not update.identity:
            return None
        if not inside:
            return update.version if updated else None
        updated = True
    return None


def _unscaled(view: RequestView) -> bool:
    """Return whether logprobs are of the unscaled distribution, which is what an oracle gives."""
    engine = view.engine or view.contract
    return engine.logprobs is Logprobs.RAW or view.request.sampling.get("temperature") in (
        None,
        1.0,
    )
