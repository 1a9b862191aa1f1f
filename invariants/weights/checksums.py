"""Checks on the checksums of tensors that trainers and servers tell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rollproof.core.events.rollout import Weights
from rollproof.core.events.weights import Checksums
from rollproof.core.records import Scalar, Version
from rollproof.invariants._shared.event_check import EventCheck, remember
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["weights_checksums_agree", "weights_checksums_can_differ"]

_K = TypeVar("_K")
_NOBODY = "nobody told checksums of weights"
_REMEMBERED = 64
"""Checksums of servers that are compared with later ones: a trace may have thousands of updates."""
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
    """Checksums of a trainer and a server for the same weights; ``open`` are the tensors of which
    it is not known whether their checksums can be equal.
    """

    trained: _Stated
    server: _Stated
    open: set[str]


class WeightsChecksumsAgree(_StatedChecksums):
    """Compares tensors of the same name. An engine may have others than its trainer, or the same in
    another layout or type (quantised ones): a tensor counts if its checksums were ever equal.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._trainer: dict[tuple[str | None, Version], _Stated] = {}
        self._servers: dict[tuple[str | None, Version, str], _Stated] = {}
        self._pairs: list[_Pair] = []
        self._comparable: set[tuple[str | None, str]] = set()

    def on_checksums(self, event: Checksums, out: Collector) -> None:
        stated, adapter = self.stated(event), event.adapter
        if stated.version is None:
            return
        if stated.owner:
            self._compare_replicas(adapter, stated, out)
            _store(self._servers, (adapter, stated.version, stated.owner), stated)
        else:
            _store(self._trainer, (adapter, stated.version), stated)
        trained = self._trainer.get((adapter, stated.version))
        if trained is None:
            return
        for server in [stated] if stated.owner else list(self._of(adapter, stated.version)):
            shared = trained.digests.keys() & server.digests.keys()
            self._comparable.update(
                (adapter, name) for name in shared if trained.digests[name] == server.digests[name]
            )
            if shared:
                self._pairs.append(_Pair(trained, server, set(shared)))
        self._settle(adapter, out)

    def _of(self, adapter: str | None, version: Version) -> Iterable[_Stated]:
        return (
            stated
            for (name, other, _), stated in self._servers.items()
            if (name, other) == (adapter, version)
        )

    def _compare_replicas(self, adapter: str | None, stated: _Stated, out: Collector) -> None:
        others = self._of(adapter, stated.version)
        other = next((other for other in others if other.owner != stated.owner), None)
        if other is None:
            return
        out.exercised("checksums of two replicas")
        differing = _differing(other, stated)
        if differing:
            out.finding(
                "replicas hold different tensors under one version",
                expected=f"the checksums of {other.owner} at event {other.index}",
                observed=f"{_names(differing)} of {stated.owner} differ",
                where={"server": stated.owner, "version": stated.version, "index": stated.index},
                hint=(
                    "One of them missed a part of the update, or was updated from elsewhere; if the"
                    " replicas are laid out differently, tell the rank with the name of a tensor"
                    " (vLLM #51350)."
                ),
            )

    def _settle(self, adapter: str | None, out: Collector) -> None:
        for pair in self._pairs:
            ready = {name for name in pair.open if (adapter, name) in self._comparable}
            pair.open -= ready
            differing = sorted(ready.intersection(_differing(pair.trained, pair.server)))
            if not pair.open:
                out.exercised("checksums of a trainer and a server")
            if differing:
                server = pair.server
                out.finding(
                    "a server holds other tensors than its trainer sent",
                    expected=f"the checksums of the trainer for version {server.version}",
                    observed=f"{_names(differing)} of {server.owner} differ",
                    where={
                        "server": server.owner,
                        "version": server.version,
                        "index": server.index,
                    },
                    hint=(
                        "These tensors were not sent, not loaded, or changed by the load (tied"
                        " weights, names that a loader skips)."
                    ),
                )
        self._pairs = [pair for pair in self._pairs if pair.open][-_REMEMBERED:]

    def finish(self, out: Collector) -> None:
        super().finish(out)
        if self._pairs:
            names = sorted(set().union(*(pair.open for pair in self._pairs)))
            out.absent(
                f"checksums of {_names(names)} were never those of the trainer: the server may have"
                " them in another layout or type"
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


def _store(entries: dict[_K, _Stated], key: _K, stated: _Stated) -> None:
    entries[key] = stated
    if len(entries) > _REMEMBERED:
        del entries[next(iter(entries))]


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
    needs="Checksums events of the trainer and of servers, or of several servers",
    exercised_by=("checksums of two replicas", "checksums of a trainer and a server"),
)(WeightsChecksumsAgree)
weights_checksums_can_differ: Check = trace_check(
    "weights.checksums-can-differ",
    promise="A checksum that is told for one version differs from that of another version.",
    needs="Checksums events of one server, or of the trainer, for several versions",
    exercised_by="checksums of other weights",
)(WeightsChecksumsCanDiffer)
