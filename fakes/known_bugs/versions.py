"""Known bugs of version tags: read too late, invented, folded wrongly, or of weights that were
never published.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from rollproof.core.case import ActionKind
from rollproof.core.contract import Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Call
from rollproof.core.records import EngineOutput, Span, Version
from rollproof.fakes.clients.reference_clients import (
    AsSampled,
    AsSampledCalls,
    AsSampledSpans,
    AsSampledTokens,
    ClientOptions,
    EngineKeep,
    PartialSample,
)
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.known_bugs._planting import (
    CLEAN,
    ENDING,
    SYNCED,
    act,
    case,
    on_engine,
    request,
)
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _SampleTag(AsSampled):
    options = ClientOptions(versions=Versions.SAMPLE)


class _TagReadAfterReply(_SampleTag):
    """Reads the server's label after it has processed the reply."""

    async def attempt(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        output = await super().attempt(sample, sent, budget)
        for _ in range(3):
            await self.wait()
        self._now = self.fleet.servers["s0"].label
        return output

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {"version": self._now}


class _TagOfSubmission(_SampleTag):
    """Tags the sample when it is scheduled, before it waits for a server."""

    async def run(self, sample: PartialSample) -> bool:
        self._stamp = self.fleet.servers["s0"].label
        return await super().run(sample)

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {"version": self._stamp}


class _VersionZeroIsFalse(AsSampled):
    """Writes ``if version:`` in place of ``if version is not None:``."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {name: tag or None for name, tag in super().version_tags(sample).items()}


class _CounterAhead(AsSampled):
    """Tags with the number of the next update."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {name: tag + 1 for name, tag in super().version_tags(sample).items()}


class _EmptyCallSetsMinimum(AsSampled):
    """The first reply sets the minimum, with or without tokens."""

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if sample.attempts == 1:
            self._first = (
                self.fleet.servers["s0"].label if output.version is None else output.version
            )
        super().absorb(sample, sent, output)

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {**super().version_tags(sample), "min_version": self._first}


class _BoundsRaisedBeforeThePause(AsSampled):
    """Reads bounds from a counter when a rollout begins and ends; an update raises the counter
    while the engines still sample.
    """

    options = ClientOptions(versions=Versions.BOUNDS)
    _counter = 0

    async def update_weights(self, version: int | None) -> None:
        self._counter = self.fleet.weights_of(None) if version is None else version
        await asyncio.sleep(
            3 * self.chosen.back_off
        )  # the trainer drains what is too stale, before the engines pause
        await super().update_weights(version)

    async def run(self, sample: PartialSample) -> bool:
        self._begun = self._counter
        return await super().run(sample)

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {"min_version": self._begun, "max_version": self._counter}


class _LastVersionOnly(AsSampled):
    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        # the minimum must be over all tokens
        return {"min_version": sample.labels[-1], "max_version": sample.labels[-1]}


class _FirstVersionOnly(AsSampled):
    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        # the maximum must be over all tokens
        return {"min_version": sample.labels[0], "max_version": sample.labels[0]}


class _VersionsComparedAsText(AsSampled):
    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        labels = [str(label) for label in sample.labels if label is not None]
        # "10" < "9"
        return {"min_version": min(labels), "max_version": max(labels)}


class _AbortedCallsUntagged(AsSampledCalls):
    """Takes the tags of calls that ended, so a sample has fewer tags than calls with tokens."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {"call_versions": tuple(sample.calls[-1:])}


class _SpansWithGap(AsSampledSpans):
    """Ends a span before the token that was sampled while the update was requested."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        first, *rest = super().version_tags(sample)["spans"]
        return {"spans": (replace(first, end=first.end - 1), *rest)}


class _SpanBorderLate(AsSampledSpans):
    """Spans meet one token too late."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        spans: tuple[Span, ...] = super().version_tags(sample)["spans"]
        first, second, *rest = spans
        return {
            "spans": (
                replace(first, end=first.end + 1),
                replace(second, start=second.start + 1),
                *rest,
            )
        }


class _EnvironmentUntagged(AsSampledTokens):
    """Gives the environment's tokens no tag, so that later tags move up."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {
            "token_versions": tuple(
                label for label, own in zip(sample.labels, sample.mask, strict=True) if own
            )
        }


class _OneTagForAllTokens(AsSampledTokens):
    """Writes the version at the end of the rollout to every token."""

    def version_tags(self, sample: PartialSample) -> dict[str, Any]:
        return {"token_versions": (sample.labels[-1],) * len(sample.labels)}


class _NewestForUnknown(AsSampledTokens):
    """Assumes the newest version if the engine shows none."""

    def merge_versions(self, sample: PartialSample, output: EngineOutput) -> None:
        super().merge_versions(sample, output)
        newest: Version = 0
        for i, label in enumerate(sample.labels):
            newest = newest if label is None else label
            sample.labels[i] = newest


class _LabelReadAtEmission(FakeEngine):
    """An update changes the label of all tokens of running calls."""

    def _publish(self, label: Version, *, loaded: bool, identity: bool = False) -> None:
        super()._publish(label, loaded=loaded, identity=identity)
        for call in self.in_flight:
            # SGLang up to 0.5.18 shows the label that the server has when it replies
            call.labels[:] = [(0, label)]


class _FirstOnly(list[tuple[int, Version]]):
    """Marks that keep only the first entry."""

    def append(self, mark: tuple[int, Version]) -> None:
        if not self:
            super().append(mark)


class _LabelReadAtAdmission(FakeEngine):
    """Tokens keep the label under which their call was admitted, whatever is loaded meanwhile."""

    def _enqueue(self, call: Call, rid: str | None) -> InflightCall:
        queued = super()._enqueue(call, rid)
        # vLLM had one label per request, read when it was admitted
        queued.labels = _FirstOnly()
        return queued


class _OldLabelForUnlabelled(AsSampled):
    async def update_weights(self, version: int | None) -> None:
        shown = {server: server.label for server in self.fleet.servers.values()}

        async def load(server: FakeEngine, weights: int, label: Version) -> None:
            await server.load(weights, shown[server] if label is None else label)

        await self.fleet.sync(version, load=load)


class _NoneKeepsOldLabel(FakeEngine):
    """An update without a label leaves the old label on the new weights."""

    async def load(self, version: int, label: Version = None, *, identity: bool = False) -> None:
        self._old_label = self.label if label is None else label
        await super().load(version, label, identity=identity)

    def _publish(self, label: Version, *, loaded: bool, identity: bool = False) -> None:
        super()._publish(label, loaded=loaded, identity=identity)
        if label is None:
            self._scheduler.show(self._old_label)


class _LabelBeforeDrain(AsSampled):
    """Publishes the label, and then lets the calls in flight end."""

    def label(self, version: int | None) -> Version:
        """Return the label of an update."""
        return version

    async def update_weights(self, version: int | None) -> None:
        servers = list(self.fleet.servers.values())
        for server in servers:
            server.relabel(self.label(version))
        for server in servers:
            await server.pause(PauseMode.WAIT)
            await server.load(self.fleet.weights_of(version), self.label(version))
            await server.resume()


class _NamedLabelBeforeDrain(_LabelBeforeDrain, AsSampledTokens):
    """Names its weights: their label is a string, and has no order."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        for server in fleet.servers.values():
            server.relabel(self.label(fleet.case.first_version))

    def label(self, version: int | None) -> Version:
        return None if version is None else f"step-{version}"


class _LabelAfterResume(AsSampled):
    """Loads without a version, as vLLM does, and publishes it when all servers serve again."""

    async def update_weights(self, version: int | None) -> None:
        servers = list(self.fleet.servers.values())
        for server in servers:
            await server.pause()
            await server.load(self.fleet.weights_of(version), server.label)
            await server.resume()
        # the trainer counts its step, and then tells the servers
        await asyncio.sleep(2 * self.chosen.back_off)
        for server in servers:
            server.relabel(version)


_SYNC_AT_START = case(act(ActionKind.SYNC, 0))
_BEGUN_BEFORE_THE_PAUSE = case(
    act(ActionKind.SYNC, 2), requests=(request(), request("r1", (21, 22))), arrivals=(0.0, 2.5)
)
_DRAINED = case(act(ActionKind.SYNC, 5), pause_mode=PauseMode.WAIT)
_OVERTAKEN = case(act(ActionKind.SYNC, 3), pause_mode=PauseMode.KEEP)
_UNLABELLED = case(act(ActionKind.SYNC_UNLABELLED, 3))
_TO_TEN = case(act(ActionKind.SYNC, 3), first_version=9)
_CONVERSATION = case(
    model=ENDING, requests=(request(max_tokens=24, turns=((21, 22), (23, 24))),), seed=1
)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="tag-read-after-reply",
        summary=(
            "The version is read after the reply arrived: tokens of version n are tagged n + 1."
        ),
        refs=("AReaL#1569", "verl vllm_async_server.py"),
        make=_TagReadAfterReply,
        cases=(_DRAINED,),
        detected_by=("versions.sample-tag",),
    ),
    KnownBug(
        id="tag-of-submission",
        summary=(
            "The version is stamped when the sample is scheduled, and an update comes before its"
            " first token."
        ),
        refs=("TRL async_rollout_worker.py", "vllm#54443"),
        make=_TagOfSubmission,
        cases=(_SYNC_AT_START,),
        detected_by=("versions.sample-tag",),
    ),
    KnownBug(
        id="version-zero-is-false",
        summary="Version 0 is dropped by a condition on the truth of the tag.",
        refs=("verl tool_agent_loop.py",),
        make=_VersionZeroIsFalse,
        cases=(CLEAN,),
        detected_by=("versions.present",),
    ),
    KnownBug(
        id="counter-ahead",
        summary=(
            "The tag is a counter that is raised before the update, and names weights that were"
            " never published."
        ),
        refs=("prime-rl#1764", "prime-rl#2937"),
        make=_CounterAhead,
        cases=(CLEAN,),
        detected_by=("versions.published",),
    ),
    KnownBug(
        id="empty-call-sets-minimum",
        summary="A call that was aborted before its first token sets the minimum.",
        refs=("verl llm_server.py (0.9.1)",),
        make=_EmptyCallSetsMinimum,
        cases=(_SYNC_AT_START,),
        detected_by=("versions.min-max",),
    ),
    KnownBug(
        id="last-version-only",
        summary="Only the last version counts: a sample with a stale start looks fresh.",
        refs=("verl#7569",),
        make=_LastVersionOnly,
        cases=(SYNCED,),
        detected_by=("versions.min-max",),
    ),
    KnownBug(
        id="first-version-only",
        summary=(
            "The first reply's version is used for the whole sample; later ones do not raise the"
            " maximum."
        ),
        refs=("verl tool_agent_loop.py",),
        make=_FirstVersionOnly,
        cases=(SYNCED,),
        detected_by=("versions.min-max",),
    ),
    KnownBug(
        id="versions-compared-as-text",
        summary="Versions are compared as text, in which 10 comes before 9.",
        refs=("sglang meta_info weight_version", "slime types.py"),
        make=_VersionsComparedAsText,
        cases=(_TO_TEN,),
        detected_by=("versions.min-max",),
    ),
    KnownBug(
        id="bounds-raised-before-the-pause",
        summary=(
            "The counter that bounds a rollout's versions is raised while the engines still sample"
            " under the old weights."
        ),
        refs=("prime-rl watcher.py (559b44772)", "prime-rl#1764"),
        make=_BoundsRaisedBeforeThePause,
        cases=(_BEGUN_BEFORE_THE_PAUSE,),
        detected_by=("versions.bounds",),
    ),
    KnownBug(
        id="aborted-calls-untagged",
        summary="The list of versions has no entry for aborted calls.",
        refs=("slime#327",),
        make=_AbortedCallsUntagged,
        cases=(SYNCED,),
        detected_by=("versions.call-tags",),
    ),
    KnownBug(
        id="spans-with-gap",
        summary="A token at the border of two spans belongs to neither.",
        refs=("vllm#54443",),
        make=_SpansWithGap,
        cases=(SYNCED,),
        detected_by=("versions.spans-cover",),
    ),
    KnownBug(
        id="span-border-late",
        summary="The border of two spans is one token after the update.",
        refs=("vllm#49040",),
        make=_SpanBorderLate,
        cases=(SYNCED,),
        detected_by=("versions.span-tags",),
    ),
    KnownBug(
        id="environment-untagged",
        summary="Tokens of the environment have no entry in the list of token versions.",
        refs=("AReaL io_struct.py",),
        make=_EnvironmentUntagged,
        cases=(_CONVERSATION,),
        detected_by=("versions.one-tag-per-token",),
    ),
    KnownBug(
        id="one-tag-for-all-tokens",
        summary="All tokens get the version at the end of the rollout.",
        refs=("AReaL#1569",),
        make=_OneTagForAllTokens,
        cases=(SYNCED,),
        detected_by=("versions.token-tags",),
    ),
    KnownBug(
        id="label-read-at-emission",
        summary=(
            "The engine shows the label at the time of the reply for tokens that older weights"
            " sampled."
        ),
        refs=("sglang#35926", "vllm#54443"),
        make=on_engine(_LabelReadAtEmission, EngineKeep),
        cases=(_OVERTAKEN,),
        detected_by=("versions.engine-tags",),
    ),
    KnownBug(
        id="label-read-at-admission",
        summary=(
            "The engine shows the label of the call's admission for tokens that newer weights"
            " sampled."
        ),
        refs=("vllm#48306", "vllm#54443"),
        make=on_engine(_LabelReadAtAdmission, EngineKeep),
        cases=(_OVERTAKEN,),
        detected_by=("versions.engine-tags",),
    ),
    KnownBug(
        id="none-keeps-old-label",
        summary="An update without a version serves new weights under the old label.",
        refs=("verl checkpoint_engine/base.py",),
        make=on_engine(_NoneKeepsOldLabel),
        cases=(_UNLABELLED,),
        detected_by=("versions.unlabelled-update",),
    ),
    KnownBug(
        id="old-label-for-unlabelled",
        summary="The stack loads weights without a label under the label of the last update.",
        refs=("verl checkpoint_engine/base.py",),
        make=_OldLabelForUnlabelled,
        cases=(_UNLABELLED,),
        detected_by=("versions.unlabelled-update",),
    ),
    KnownBug(
        id="newest-for-unknown",
        summary="Tokens of unknown version are tagged with the newest version.",
        refs=("slime#327", "verl tool_agent_loop.py"),
        make=_NewestForUnknown,
        cases=(_UNLABELLED,),
        detected_by=("versions.unknown-stays-unknown",),
    ),
    KnownBug(
        id="label-before-drain",
        summary=(
            "The new version is published before the calls in flight have drained: old weights"
            " sample under it."
        ),
        refs=("cf. prime-rl#1764",),
        make=_LabelBeforeDrain,
        cases=(SYNCED,),
        detected_by=("versions.label-with-weights", "versions.engine-tags"),
    ),
    KnownBug(
        id="named-label-before-drain",
        summary=(
            "As label-before-drain, by a stack whose labels are names: only their loads show for"
            " which weights they are."
        ),
        refs=("cf. prime-rl#1764",),
        make=_NamedLabelBeforeDrain,
        cases=(SYNCED,),
        detected_by=("versions.label-with-weights",),
    ),
    KnownBug(
        id="label-after-resume",
        summary=(
            "The new version is published only after the servers were resumed: new weights sample"
            " under the old one."
        ),
        refs=("cf. prime-rl#1764",),
        make=_LabelAfterResume,
        cases=(SYNCED,),
        detected_by=("versions.label-with-weights",),
    ),
)
