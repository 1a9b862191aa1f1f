"""``weights.checksums-agree`` and ``weights.checksums-can-differ``."""

from __future__ import annotations

import hashlib

from rollproof.core.events.weights import Checksums
from tests.support.trace_script import TraceScript, finds, inapplicable, passes, unknown

AGREE, DIFFER = "weights.checksums-agree", "weights.checksums-can-differ"


def _told(version: int | None, server: str | None = None, **digests: str) -> Checksums:
    return Checksums(version=version, server_id=server, digests=digests)


def _script(*events: Checksums) -> TraceScript:
    script = TraceScript()
    script.weights(0)
    script.add(*events)
    return script


def test_without_checksums_both_are_ruled_out() -> None:
    """Nobody told any."""
    for name in (AGREE, DIFFER):
        inapplicable(name, _script(), "nobody told checksums of weights")


def test_checksums_of_trainer_and_servers_that_are_equal_pass() -> None:
    """Whoever tells first; a server need not say of which weights."""
    script = _script(
        _told(0, a="1", b="2"), _told(None, "s0", a="1", b="2"), _told(0, "s1", a="1", b="2")
    )
    passes(AGREE, script, checksums_of_two_replicas=1, checksums_of_a_trainer_and_a_server=2)
    script = _script(_told(0, "s0", a="1"), _told(0, a="1"))
    passes(AGREE, script, checksums_of_a_trainer_and_a_server=1)


def test_a_tensor_that_a_server_does_not_have_is_found() -> None:
    """Its checksum was the trainer's once, and is not any more."""
    script = _script(
        _told(0, a="1", b="1"), _told(0, "s0", a="1", b="1"),
        _told(1, a="2", b="2"), _told(1, "s0", a="2", b="1"),
    )  # fmt: skip
    finding = finds(AGREE, script)
    assert (
        "a server holds other tensors than its trainer sent",
        "the checksums of the trainer for version 1",
        "b of s0 differ",
    ) == (finding.title, finding.expected, finding.observed)
    assert {"server": "s0", "version": 1, "index": 4} == finding.where


def test_many_tensors_are_listed_in_short() -> None:
    """The first three by name, and how many more."""
    old, new = dict.fromkeys("abcde", "1"), dict.fromkeys("abcde", "2")
    script = _script(_told(0, **old), _told(0, "s0", **old), _told(1, **new), _told(1, "s0", **old))
    assert "a, b, c and 2 more of s0 differ" == finds(AGREE, script).observed


def test_a_difference_from_before_the_tensors_were_comparable_is_found_later() -> None:
    """The order in which they are told does not matter."""
    script = _script(
        _told(1, a="2"), _told(1, "s0", a="1"), _told(2, a="3"), _told(2, "s0", a="3")
    )  # fmt: skip
    assert {"server": "s0", "version": 1, "index": 2} == finds(AGREE, script).where


def test_tensors_that_were_never_equal_are_unknown() -> None:
    """An engine may quantise them, or lay them out differently; other names are not compared."""
    script = _script(
        _told(0, a="1", embedding="9"), _told(0, "s0", a="q1", embedding="9"),
        _told(1, a="2", embedding="9"), _told(1, "s0", a="q2", embedding="9"),
    )  # fmt: skip
    unknown(AGREE, script, "checksums of a of s0 were never those of the trainer")
    unknown(AGREE, _script(_told(0, a="1"), _told(0, "s0", qkv="2")), "not exercised")


def test_replicas_that_differ_are_found_without_a_trainer() -> None:
    """They were equal in another version, so they are laid out alike. Who tells first, and in which
    order versions come, makes no difference.
    """
    equal = (_told(0, "s0", a="1", b="1"), _told(0, "s1", a="1", b="1"))
    differ = (_told(1, "s0", a="2", b="2"), _told(1, "s1", a="2", b="1"))
    finding = finds(AGREE, _script(*equal, *differ))
    assert "replicas hold different tensors under one version" == finding.title
    assert "the checksums of s0 at event 3" == finding.expected
    assert "b of s1 differ" == finding.observed
    for other_order in ((*differ, *equal), (*equal, *reversed(differ))):
        assert "b of " in finds(AGREE, _script(*other_order)).observed


def test_replicas_that_were_never_equal_are_unknown() -> None:
    """One may be sharded over more ranks, as prefill and decode servers are."""
    script = _script(
        *(
            _told(version, server, norm=str(version), mlp=f"{server} {version}")
            for version in (0, 1)
            for server in ("prefill", "decode")
        )
    )
    unknown(AGREE, script, "checksums of mlp of decode were never those of prefill")


def test_servers_of_two_layouts_are_compared_within_their_layout() -> None:
    """Each finds one that has the same checksums, whoever tells first."""
    told = [
        _told(version, f"{kind}{number}", mlp=f"{kind} {version}")
        for version in (0, 1)
        for kind in ("prefill", "decode")
        for number in (0, 1)
    ]
    told[-1] = _told(1, "decode1", mlp="decode 0")
    finding = finds(AGREE, _script(*told))
    assert ("the checksums of decode0 at event 7", "mlp of decode1 differ") == (
        finding.expected,
        finding.observed,
    )


def test_other_versions_and_adapters_are_not_compared() -> None:
    """A replica may be behind; an adapter has tensors of its own."""
    script = _script(
        _told(1, "s0", a="1"),
        _told(2, "s1", a="2"),
        Checksums(version=1, server_id="s1", adapter="policy", digests={"a": "3"}),
        Checksums(version=None, server_id="s9", digests={"a": "4"}),
    )
    unknown(AGREE, script, "not exercised")


def test_checksums_that_never_change_are_found() -> None:
    """Over three versions; two may be equal (a learning rate of 0), and are no proof."""
    two = _script(_told(0, "s0", a="1"), _told(1, "s0", a="1"))
    passes(DIFFER, two, checksums_of_other_weights=1)
    three = _script(*(_told(version, "s0", a="1") for version in range(3)))
    finding = finds(DIFFER, three)
    assert "checksums stay the same although the weights change" == finding.title
    assert "s0 told the same 1 checksums for three versions, up to 2" == finding.observed
    trainer = _script(*(_told(version, a="1") for version in range(3)))
    assert "the trainer told the same" in finds(DIFFER, trainer).observed


def test_a_frozen_tensor_is_no_constant_checksum() -> None:
    """One tensor that changes is enough; telling the same weights again changes nothing."""
    script = _script(*(_told(v, "s0", frozen="1", a=str(v)) for v in (0, 0, 0, 1, 2, 3)))
    passes(DIFFER, script, checksums_of_other_weights=3)


def test_the_digest_of_no_bytes_is_found() -> None:
    """The tensor that it was computed over is empty."""
    for name in ("sha256", "md5"):
        empty = hashlib.new(name).hexdigest()
        finding = finds(DIFFER, _script(_told(0, "s0", gate=empty, a="1")))
        assert "a checksum is that of no bytes" == finding.title
        assert "gate of s0: the digest of nothing" == finding.observed
        assert "vLLM #52689" in finding.hint
