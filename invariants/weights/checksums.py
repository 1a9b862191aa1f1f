"""Checks on the checksums of tensors that trainers and servers tell."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.events.rollout import Weights
from rollproof.core.events.weights import Checksums
from rollproof.core.records import Scalar, Version
from rollproof.invariants._shared.event_check import EventCheck, remember
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["weights_checksums_agree", "weights_checksums_can_differ"]

_NOBODY = "nobody told checksums of weights"
_REMEMBERED = 8
"""Of how many versions the checksums of a server are compared with later ones: a trace may have
thousands of updates.
"""
_OPEN_PAIRS = 64
_LISTED = 3
_OF_NOTHING = frozenset(
    hashlib.new(name, usedforsecurity=False).hexdigest()
    for name in ("sha256", "sha1", "md5", "sha512", "blake2b")
)
"""What these digests give for no bytes at all."""


@dataclass(frozen=True, slots=True)
class _Stated:
    """Who told checksums of which weights, and where."""

    owner: str
    version: Version
    digests: Mapping[str, str]
    index: int


class _StatedChecksums(EventCheck):
    """Knows the weights of which a server tells checksums, also if the server does not say."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._loaded: dict[tuple[str, str | None], Version] = {}
        self.any_stated: bool = False

    def on_weights(self, event: Weights, out: Collector) -> None:
        if event.loaded:
            self._loaded[event.server_id, event.adapter] = event.version

    def stated(self, event: Checksums) -> _Stated:
        """Return who told checksums of which weights; ``""`` is the trainer."""
        self.any_stated = True
        version = event.version
        if version is None and event.server_id is not None:
            version = self._loaded.get((event.server_id, event.adapter))
        return _Stated(event.server_id or "", version, event.digests, event.index)

    def finish(self, out: Collector) -> None:
        if not self.any_stated:
            out.inapplicable(_NOBODY)


@dataclass(slots=True, eq=False)
class _Pair:
    """Checksums of a server and of its trainer or another server for the same weights; ``open`` are
    the tensors of which it is not known whether their checksums can be equal.
    """

    reference: _Stated
    server: _Stated
    open: set[str]

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(sorted((self.reference.owner, self.server.owner)))


class WeightsChecksumsAgree(_StatedChecksums):
    """Compares tensors of the same name. A server may have others than its trainer or another
    server, or the same in another layout or type (sharded, quantised): a tensor counts for two of
    them if their checksums of it were ever equal.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._recent: dict[tuple[str | None, str], dict[Version, _Stated]] = {}
        self._peers: dict[tuple[str | None, str], str] = {}
        self._pairs: dict[str | None, list[_Pair]] = {}
        self._comparable: dict[tuple[str | None, tuple[str, ...]], set[str]] = {}

    def on_checksums(self, event: Checksums, out: Collector) -> None:
        stated, adapter = self.stated(event), event.adapter
        if stated.version is None:
            return
        others = [
            recent[stated.version]
            for (name, owner), recent in self._recent.items()
            if name == adapter and owner != stated.owner and stated.version in recent
        ]
        recent = self._recent.setdefault((adapter, stated.owner), {})
        recent.pop(stated.version, None)
        recent[stated.version] = stated
        if len(recent) > _REMEMBERED:
            del recent[next(iter(recent))]
        if stated.owner:
            self._choose_peer(adapter, stated, [other for other in others if other.owner])
        for other in others:
            if not stated.owner or self._peers.get((adapter, other.owner)) == stated.owner:
                self._pair(adapter, stated, other)
            elif not other.owner or self._peers[adapter, stated.owner] == other.owner:
                self._pair(adapter, other, stated)
        self._settle(adapter, out)

    def _choose_peer(self, adapter: str | None, stated: _Stated, servers: list[_Stated]) -> None:
        """Choose with which server this one is compared: one alone, since pairs of all of a large
        fleet are many. Servers of one layout find each other by equal checksums.
        """
        if servers and (adapter, stated.owner) not in self._peers:
            alike = (other for other in servers if not _differing(other, stated))
            self._peers[adapter, stated.owner] = next(alike, servers[0]).owner

    def _pair(self, adapter: str | None, reference: _Stated, server: _Stated) -> None:
        shared = reference.digests.keys() & server.digests.keys()
        if not shared:
            return
        pair = _Pair(reference, server, shared)
        equal = {name for name in shared if reference.digests[name] == server.digests[name]}
        self._comparable.setdefault((adapter, pair.owners), set()).update(equal)
        self._pairs.setdefault(adapter, []).append(pair)

    def _settle(self, adapter: str | None, out: Collector) -> None:
        pairs = self._pairs.get(adapter, [])
        for pair in pairs:
            ready = pair.open & self._comparable[adapter, pair.owners]
            pair.open -= ready
            if not pair.open:
                out.exercised(
                    "checksums of a trainer and a server"
                    if not pair.reference.owner
                    else "checksums of two replicas"
                )
            differing = sorted(ready.intersection(_differing(pair.reference, pair.server)))
            if differing:
                _report(pair, differing, out)
        pairs[:] = [pair for pair in pairs if pair.open][-_OPEN_PAIRS:]

    def finish(self, out: Collector) -> None:
        super().finish(out)
        for pair in itertools.chain.from_iterable(self._pairs.values()):
            out.absent(
                f"checksums of {_names(sorted(pair.open))} of {pair.server.owner} were never those"
                f" of {pair.reference.owner or 'the trainer'}: it may have them in another layout"
                " or type"
            )
            return


def _report(pair: _Pair, differing: list[str], out: Collector) -> None:
    reference, server = pair.reference, pair.server
    replica = bool(reference.owner)
    out.finding(
        "replicas hold different tensors under one version"
        if replica
        else "a server holds other tensors than its trainer sent",
        expected=(
            f"the checksums of {reference.owner} at event {reference.index}"
            if replica
            else f"the checksums of the trainer for version {server.version}"
        ),
        observed=f"{_names(differing)} of {server.owner} differ",
        where={"server": server.owner, "version": server.version, "index": server.index},
        hint=(
            "One of them missed a part of the update, or was updated from elsewhere. They were"
            " equal in another version, so they are laid out alike."
            if replica
            else "These tensors were not sent, not loaded, or changed by the load (tied weights,"
            " names that a loader skips)."
        ),
    )


class WeightsChecksumsCanDiffer(_StatedChecksums):
    """A step may leave weights as they are (a learning rate of 0), so that two versions alone prove
    nothing.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._last: dict[tuple[str, str | None], tuple[_Stated, int]] = {}
        self._reported: set[tuple[str, str | None]] = set()

    def on_checksums(self, event: Checksums, out: Collector) -> None:
        stated = self.stated(event)
        owner = stated.owner or "the trainer"
        key = (owner, event.adapter)
        where: Mapping[str, Scalar] = {
            "server": stated.owner or None,
            "version": stated.version,
            "index": stated.index,
        }
        empty = sorted(name for name, digest in stated.digests.items() if digest in _OF_NOTHING)
        if empty and key not in self._reported:
            self._reported.add(key)
            out.finding(
                "a checksum is that of no bytes",
                expected="checksums of the tensors that compute",
                observed=f"{_names(empty)} of {owner}: the digest of nothing",
                where=where,
                hint=(
                    "The parameter is an empty placeholder, and the weights that compute are packed"
                    " elsewhere (vLLM on a CPU): compute the checksum of those (vLLM #52689)."
                ),
            )
        before, repeats = self._last.get(key, (None, 0))
        if before is None or stated.version is None or before.version == stated.version:
            remember(self._last, key, (stated, repeats))
            return
        out.exercised("checksums of other weights")
        repeats = repeats + 1 if dict(before.digests) == dict(stated.digests) else 0
        remember(self._last, key, (stated, repeats))
        if repeats >= 2 and key not in self._reported:
            self._reported.add(key)
            out.finding(
                "checksums stay the same although the weights change",
                expected="other checksums for other weights",
                observed=(
                    f"{owner} told the same {len(stated.digests)} checksums for three versions, up"
                    f" to {stated.version}"
                ),
                where=where,
                hint=(
                    "They are cached, or computed over tensors that an update does not touch: such"
                    " a comparison passes whatever was loaded (vLLM #52689)."
                ),
            )


def _differing(one: _Stated, other: _Stated) -> list[str]:
    """Return the tensors that both have, with different checksums."""
    return sorted(
        name
        for name, digest in one.digests.items()
        if name in other.digests and other.digests[name] != digest
    )


def _names(tensors: list[str]) -> str:
    shown = ", ".join(tensors[:_LISTED])
    more = len(tensors) - _LISTED
    return f"{shown} and {more} more" if more > 0 else shown


weights_checksums_agree: Check = trace_check(
    "weights.checksums-agree",
    promise=(
        "The tensors of a server have the checksums that its trainer and the other servers tell for"
        " the same weights."
    ),
    needs=(
        "Checksums events of the trainer and of servers, or of several servers, which were equal in"
        " some version"
    ),
    exercised_by=("checksums of two replicas", "checksums of a trainer and a server"),
)(WeightsChecksumsAgree)
weights_checksums_can_differ: Check = trace_check(
    "weights.checksums-can-differ",
    promise="A checksum that is told for one version differs from that of another version.",
    needs="Checksums events of one server, or of the trainer, for several versions",
    exercised_by="checksums of other weights",
)(WeightsChecksumsCanDiffer)
