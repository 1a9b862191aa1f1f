"""Events of adapters, deltas and checksums in words, as stories show them."""

from __future__ import annotations

import pytest

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Weights
from rollproof.core.events.weights import Adapter, AdapterChange, Checksums
from rollproof.judging.event_words import described


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            Weights(server_id="s0", version=2, label=2, adapter="policy"),
            "version 2 of adapter policy on s0",
        ),
        (
            Weights(server_id="s0", version=None, label=None, adapter="policy"),
            "load of adapter policy on s0",
        ),
        (
            Weights(server_id="s0", version=3, label=3, delta_of=2),
            "sync to v3 on s0 by a delta from v2",
        ),
        (
            Adapter(server_id="s0", name="policy", change=AdapterChange.IGNORED),
            "load of adapter policy ignored by s0, which has it",
        ),
        (
            Adapter(server_id="s0", name="policy", change=AdapterChange.EVICTED),
            "adapter policy evicted on s0",
        ),
        (
            Call(
                call_id=1,
                request_id="r0",
                server_id="s0",
                prompt_ids=(1, 2),
                max_tokens=3,
                adapter="policy",
            ),
            "call 1 on s0 with 2 tokens by adapter policy",
        ),
        (Checksums(version=2, digests={"a": "1"}, server_id="s0"), "s0 told 1 checksum"),
        (Checksums(version=2, digests={"a": "1", "b": "2"}), "the trainer told 2 checksums"),
    ],
)
def test_events_in_words(event: Event, words: str) -> None:
    """A story names the adapter, the base of a delta, and who told checksums."""
    assert words == described(event)
