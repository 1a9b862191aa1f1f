"""Checks on the adapters (LoRA) that weight updates bring, and that calls name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.events.rollout import (
    Admit,
    Call,
    Fault,
    Reply,
    Result,
    Submit,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.events.weights import Adapter, AdapterChange
from rollproof.core.records import Scalar, Version
from rollproof.invariants._shared.event_check import EventCheck, remember
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.core.contract import Contract
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["weights_adapter_applied", "weights_adapter_current", "weights_adapter_loaded"]


def _without_adapters(contract: Contract) -> str | None:
    if contract.adapters is None:
        return "the contract declares no adapters: updates bring the model itself"
    return None


@dataclass(frozen=True, slots=True)
class _LoadedAdapter:
    """An adapter that a server has: its version, the base model that it was trained on, the scale
    at which it is applied, and the event of its load.
    """

    version: Version
    base: Version
    scale: float | None
    index: int


class _Servers(EventCheck):
    """Follows the adapters and the base model of each server."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self.loaded: dict[str, dict[str, _LoadedAdapter]] = {}
        self.base: dict[str, Version] = {}
        self.unloaded: dict[tuple[str, str], int] = {}

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded:
            return
        if event.adapter is None:
            self.base[event.server_id] = event.version
            return
        self.loaded.setdefault(event.server_id, {})[event.adapter] = _LoadedAdapter(
            event.version, event.base, event.true_scale, event.index
        )

    def on_adapter(self, event: Adapter, out: Collector) -> None:
        adapters = self.loaded.setdefault(event.server_id, {})
        if event.change is AdapterChange.UNLOADED:
            adapters.pop(event.name, None)
            remember(self.unloaded, (event.server_id, event.name), event.index)
        elif event.change is AdapterChange.RELOADED and event.name in adapters:
            loaded = adapters[event.name]
            adapters[event.name] = _LoadedAdapter(
                loaded.version if event.version is None else event.version,
                loaded.base,
                event.true_scale,
                event.index,
            )

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what == "death" and event.server_id is not None:
            # what it has when it is back is told by loads of its own
            self.loaded.pop(event.server_id, None)

    def adapter_of(self, call: Call) -> _LoadedAdapter | None:
        """Return the adapter that a call names, if its server is known to have it."""
        if call.adapter is None:
            return None
        return self.loaded.get(call.server_id, {}).get(call.adapter)


class WeightsAdapterLoaded(_Servers):
    """A call to a server that died since says nothing: whoever restarts it may not tell what it
    has.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._restarted: set[str] = set()

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        if event.what == "death" and event.server_id is not None:
            self._restarted.add(event.server_id)

    def on_call(self, event: Call, out: Collector) -> None:
        """Look the name up when the call is made, as engines do."""
        if event.adapter is None or event.server_id in self._restarted:
            return
        there = self.adapter_of(event) is not None
        gone = self.unloaded.get((event.server_id, event.adapter))
        if not there and gone is None and self.context.oracle is None:
            # whoever records a live run may begin after the load
            out.absent(f"the trace has no load of adapter {event.adapter!r} on {event.server_id}")
            return
        out.exercised("calls that name an adapter")
        if there:
            return
        loaded = sorted(self.loaded.get(event.server_id, {}))
        out.finding(
            "a call names an adapter that its server does not have",
            expected=(
                f"one of {loaded} on {event.server_id}, or the base model"
                if loaded
                else f"no adapter: {event.server_id} was given none"
            ),
            observed=f"call {event.call_id} names {event.adapter!r}"
            + ("" if gone is None else f", which was unloaded at event {gone}"),
            where={"call": event.call_id, "server": event.server_id, "index": event.index},
            hint=(
                "The adapter was never brought to this server."
                if gone is None
                else "Unload an adapter when no rollout that began with it is left: a resumed call"
                " names it again (TRL #7017)."
            ),
        )


class WeightsAdapterCurrent(_Servers):
    """The first call of a request decides: a request that is resumed may go on by the adapter with
    which it began.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._ended: Version = None
        self._due: dict[str, Version] = {}
        self._away: set[str] = set()

    def on_update(self, event: Update, out: Collector) -> None:
        if event.phase is UpdatePhase.ENDED and not _is_newer(self._ended, event.version):
            self._ended = event.version

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        if event.server_id is not None and event.what in ("death", "leave", "update-failure"):
            # it may have missed the update: weights.update-loads judges what it serves
            self._away.add(event.server_id)

    def on_submit(self, event: Submit, out: Collector) -> None:
        if self._ended is not None:
            remember(self._due, event.request.request_id, self._ended)

    def on_call(self, event: Call, out: Collector) -> None:
        due = self._due.pop(event.request_id, None)
        if due is None or event.server_id in self._away:
            return
        loaded = self.adapter_of(event)
        named = self.base.get(event.server_id) if loaded is None else loaded.version
        # an unknown name is judged by weights.adapter-loaded
        if named is None or (loaded is None and event.adapter is not None):
            return
        server = event.server_id
        adapters = self.loaded.get(server, {})
        versions = [self.base.get(server), *(adapter.version for adapter in adapters.values())]
        # weights.update-loads judges a server that got nothing, weights.adapter-applied the rest
        if all(version is None or _is_newer(due, version) for version in versions) or (
            loaded is not None and loaded.base != self.base.get(server)
        ):
            return
        out.exercised("requests after an update")
        if not _is_newer(due, named):
            return
        has = ", ".join(
            f"{name!r} of version {adapter.version}" for name, adapter in sorted(adapters.items())
        )
        target = "the base model" if event.adapter is None else f"adapter {event.adapter!r}"
        out.finding(
            "a request that began after an update is served by older weights",
            expected=f"version {due} or newer; {server} has {has or 'no adapter'}",
            observed=f"call {event.call_id} names {target}, which is version {named}",
            where={
                "request": event.request_id,
                "call": event.call_id,
                "server": server,
                "version": named,
                "index": event.index,
            },
            hint=(
                "The adapter was brought, and the call does not name it: pass its name"
                " (`lora_request`, `model` or `lora_path`)."
                if event.adapter is None
                else "The name that calls use was not changed with the update (AReaL #1021)."
            ),
        )

    def on_result(self, event: Result, out: Collector) -> None:
        self._due.pop(event.request_id, None)


class WeightsAdapterApplied(_Servers):
    """Judges an adapter when a call is admitted that it serves; each load once."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._calls: dict[int, Call] = {}
        self._judged: set[tuple[str, int, Version]] = set()
        self._admits = False

    def on_call(self, event: Call, out: Collector) -> None:
        if event.adapter is not None:
            remember(self._calls, event.call_id, event)

    def on_admit(self, event: Admit, out: Collector) -> None:
        self._admits = True
        call = self._calls.get(event.call_id)
        loaded = None if call is None else self.adapter_of(call)
        if call is None or loaded is None:
            return
        base = self.base.get(call.server_id)
        place = (call.server_id, loaded.index, base)
        out.exercised("calls by an adapter")
        if place in self._judged:
            return
        # a stack loads few adapters, and the set is as long as its updates
        if len(self._judged) > 4096:
            self._judged.clear()
        self._judged.add(place)
        self._judge(call, loaded, base, out)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._calls.pop(event.call_id, None)

    def finish(self, out: Collector) -> None:
        if self._calls and not self._admits:
            out.absent("the trace does not say when a server admits a call")

    @staticmethod
    def _judge(call: Call, loaded: _LoadedAdapter, base: Version, out: Collector) -> None:
        where: Mapping[str, Scalar] = {
            "call": call.call_id,
            "server": call.server_id,
            "version": loaded.version,
            "index": loaded.index,
        }
        if loaded.base is not None and base is not None and loaded.base != base:
            out.finding(
                "an adapter serves over another base model than it was trained on",
                expected=(
                    f"base model {loaded.base} below version {loaded.version} of adapter"
                    f" {call.adapter!r}"
                ),
                observed=f"{call.server_id} has base model {base}",
                where=where,
                hint=(
                    "The base model was updated, and the adapter of before was left in place:"
                    " unload it, or bring the new one before a call names it."
                ),
            )
        if loaded.scale is not None and loaded.scale != 1:
            out.finding(
                "an adapter is applied at another scale than it was trained with",
                expected=f"the scale of adapter {call.adapter!r}, once",
                observed=f"{loaded.scale:g} times that scale on {call.server_id}",
                where=where,
                hint=(
                    "alpha / rank was multiplied into the tensors and is applied again when they"
                    " are loaded, or loaded again after an eviction (SkyRL #2250), or got lost on"
                    " the way (UniRL #155)."
                ),
            )


def _is_newer(version: Version, other: Version) -> bool:
    """Return whether weights are known to be newer than others. Only numbers have an order."""
    return isinstance(version, int) and isinstance(other, int) and version > other


weights_adapter_loaded: Check = trace_check(
    "weights.adapter-loaded",
    promise="A call names no adapter that its server does not have.",
    needs="calls that say which adapter they name, and the Weights and Adapter events of servers",
    exercised_by="calls that name an adapter",
    applies=_without_adapters,
)(WeightsAdapterLoaded)
weights_adapter_current: Check = trace_check(
    "weights.adapter-current",
    promise=(
        "A request that begins after a weight update is served by the adapter of that update, or a"
        " newer one."
    ),
    needs="Update events, calls that say which adapter they name, and Weights events of servers",
    exercised_by="requests after an update",
    applies=_without_adapters,
)(WeightsAdapterCurrent)
weights_adapter_applied: Check = trace_check(
    "weights.adapter-applied",
    promise=(
        "An adapter that serves a call is applied once, at its own scale, over the base model on"
        " which it was trained."
    ),
    needs=(
        "Weights and Adapter events that say base and scale of an adapter, and Admit events of the"
        " servers"
    ),
    exercised_by="calls by an adapter",
    applies=_without_adapters,
)(WeightsAdapterApplied)
