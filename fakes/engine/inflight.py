"""One call inside a fake engine: its tokens, its KV, and the wire to its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import FinishReason, Scalar, Version
from rollproof.fakes.coded.policy import PrefixState
from rollproof.fakes.engine.adapters import LoadedAdapter
from rollproof.fakes.engine.flavours import Flavour, ReprefillRows
from rollproof.fakes.engine.kv_cache import KeySpan, Kv, Root, clipped, key_of

__all__ = ["FirstDraw", "InflightCall", "Wire"]


@dataclass(slots=True, eq=False)
class Wire:
    """The connection between an engine and the caller of one call.

    stream: how the reply is streamed; ``None`` for one reply at the end.
    on_token: called after each sampled token of a stream.
    delivered: whether the reply arrives; a lost reply is recorded as a fault.
    late: seconds by which the reply arrives late.
    caller_left: returns whether the caller has closed the connection.
    sent_call: the call whose reply was sent and counted as delivered.
    """

    stream: StreamMode | None = None
    on_token: Callable[[InflightCall], None] | None = None
    delivered: bool = True
    late: float = 0.0
    caller_left: Callable[[], bool] | None = None
    sent_call: int | None = None

    @property
    def open(self) -> bool:
        """Whether a reply that is sent now arrives complete."""
        return self.delivered and not (self.caller_left is not None and self.caller_left())

    def send(self, call_id: int) -> bool:
        """Send the reply of a call; return whether it arrives, as far as the engine can tell."""
        if not self.open:
            return False
        self.sent_call = call_id
        return True


@dataclass(frozen=True, slots=True)
class FirstDraw:
    """How the first token of a call is drawn. The samples of one prompt differ in it, so that one
    can be told from another; what follows depends on weights and tokens alone.

    seed: the draw among those of the same prompt and weights; 0: the policy's own.
    taken: first tokens of other samples of the prompt, to which this one is added; ``None``: it may
        be one of them.
    """

    seed: int = 0
    taken: set[int] | None = None


@dataclass(slots=True, eq=False)
class InflightCall:
    """A call between its submission and its reply.

    rid: the engine's own handle of the call, for aborts.
    ids: prompt and sampled tokens.
    limit: the length at which the call ends.
    ends: tokens that end the call.
    future: resolved when the call ends; ``ended`` then holds the reason and the server's label.
    state: state of the coded policy after ``ids``.
    kv: the KV that the call has computed or adopted.
    key: codes the next decode step; valid while ``decoding``.
    decoding: whether the KV of all tokens but the last is complete.
    started: whether the call left the queue at least once.
    stays_queued: the call may not leave the queue in this step.
    deferred: the engine has not checked yet whether the last token ends the call.
    watched: the hooks follow each of its tokens.
    draw: how its first token is drawn.
    drawn: the number of the draw that gave it; ``None`` before.
    shares: its KV may go into the prefix cache, below ``root``; not after the cache was cleared.
    keys, labels: marks; from this many tokens on, tokens are sampled under this key and shown
        under this label.
    kept_rows: rows that outlive their KV.
    lost_after, late_by, duplicated: planned faults of the reply, in steps.
    wire: the connection to the caller; ``None`` for a call within the program.
    adapter: the adapter that serves it; ``None``: the base model does.
    masked_by: the sampling parameters that its sampling mask is of; ``None``: none is requested.
    """

    call_id: int
    request_id: str
    server_id: str
    rid: str
    ids: list[int]
    prompt_len: int
    limit: int
    routes_start: int
    want_routes: bool
    want_logprobs: bool
    future: asyncio.Future[None]
    state: PrefixState
    ends: frozenset[int] = frozenset()
    kv: Kv = field(default_factory=Kv)
    key: Version = None
    decoding: bool = False
    running: bool = False
    started: bool = False
    stays_queued: bool = False
    deferred: bool = False
    watched: bool = False
    draw: FirstDraw = field(default_factory=lambda: FirstDraw())
    drawn: int | None = None
    shares: bool = True
    root: Root = field(default_factory=lambda: Root())
    cached: int | None = None
    admission_label: Version = None
    keys: list[tuple[int, Version]] = field(default_factory=list)
    labels: list[tuple[int, Version]] = field(default_factory=list)
    kept_rows: list[KeySpan] = field(default_factory=list)
    lost_after: int | None = None
    late_by: int = 0
    duplicated: bool = False
    ended: tuple[FinishReason, Version] | None = None
    wire: Wire | None = None
    adapter: LoadedAdapter | None = None
    masked_by: Mapping[str, Scalar] | None = None

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_len

    def settle(self, version: Version) -> None:
        """Write down the KV that decoding under ``version`` has computed since the last time."""
        if self.decoding:
            self.kv.forward(version, len(self.ids) - 1)

    def rekey(self, version: Version) -> None:
        """From here on, decode under weights ``version``."""
        if self.decoding:
            self.mark_key(key_of(version, self.kv.weights))

    def mark_key(self, key: Version) -> None:
        """Sample the next token under ``key``."""
        self.key = key
        if not self.keys or self.keys[-1][1] != key:
            self.keys.append((self.sampled, key))

    def mark_label(self, label: Version) -> None:
        """Show the next token under ``label``."""
        if not self.labels or self.labels[-1][1] != label:
            self.labels.append((self.sampled, label))

    def drop_kv(self, flavour: Flavour) -> None:
        """Lose the KV; ``settle`` first. Rows of sampled tokens stay if the flavour keeps them."""
        if flavour.recompute is ReprefillRows.KEPT and self.sampled:
            self.kept_rows = self.rows()
        self.kv.drop()
        self.decoding, self.shares = False, True

    def rows(self) -> list[KeySpan]:
        """Return the keys of the rows that the engine has, over absolute positions from 0.

        The last token has none: it was sampled and never forwarded.
        """
        end = self.kept_rows[-1].stop if self.kept_rows else 0
        return self.kept_rows + clipped(self.kv.spans, end, len(self.ids) - 1)
