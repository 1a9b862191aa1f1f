"""One call inside a fake engine: its tokens, its KV, and the reply that it makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from rollproof.core.contract import Filler, LayerAxis, Rows
from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import EngineOutput, FinishReason, IntArray, LogprobArray, Span, Version
from rollproof.core.trace import Reply
from rollproof.errors import RollproofError
from rollproof.fakes.coded.hashing import hashes_of_many
from rollproof.fakes.coded.policy import CodedPolicy, State, VersionSpan
from rollproof.fakes.engine.flavours import Flavour, Recompute, VersionTag
from rollproof.fakes.engine.kv_cache import KeySpan, Kv, as_spans, clipped, key_of
from rollproof.store.packed_dtype import narrow

__all__ = [
    "AT_HAND",
    "EngineCall",
    "Wire",
    "broken_off",
    "empty_abort",
    "filler_rows",
    "handed",
    "replies_to",
]


@dataclass(slots=True, eq=False)
class Wire:
    """What lies between an engine and the caller of a call, where something does.

    ``stream`` is how the reply is streamed; ``heard`` is then told of each token. Without
    ``delivered`` the reply gets lost, and it comes ``late`` seconds late. ``left`` says whether the
    caller has gone away. ``sent`` is the call whose reply was sent off as delivered. ``narrow``:
    routes may be ``rollproof.store.packed_dtype.Narrow``, as whoever gets them and the trace know
    of it.
    """

    stream: StreamMode | None = None
    heard: Callable[[EngineCall], None] | None = None
    delivered: bool = True
    late: float = 0.0
    left: Callable[[], bool] | None = None
    sent: int | None = None
    narrow: bool = False

    @property
    def open(self) -> bool:
        """Whether a reply that is sent now arrives whole."""
        return self.delivered and not (self.left is not None and self.left())

    def send(self, call_id: int) -> bool:
        """Send the reply of a call off; whether it arrives whole, as far as can be told by now."""
        if not self.open:
            return False
        if self is not AT_HAND:
            self.sent = call_id
        return True


AT_HAND = Wire()
"""Nothing lies between: a call within the program."""
_NO_WEIGHTS: frozenset[int] = frozenset()
_fits = lru_cache(maxsize=64)(np.can_cast)


@dataclass(slots=True, eq=False)
class EngineCall:
    """A call in flight. ``ids`` are prompt and sampled tokens, ``limit`` the length at which it
    ends.

    ``ahead`` are tokens that were drawn from ``state`` under ``ahead_key``, of which the first
    ``used`` are sampled; ``after`` is the state after all of them.

    ``key`` codes the next decode step; it is valid while ``decoding``. ``keys`` and ``labels`` are
    marks: from this many tokens on, tokens are sampled under this key, shown under this label.
    ``kept`` are rows that outlive their KV. ``started`` says that it left the queue at least once,
    ``held`` that it may not leave it in this step, ``deferred`` that the engine has not looked yet
    whether it is finished. ``watched``: the hooks want to see each of its tokens. ``shares``: its
    KV may go into the prefix cache; not when that was cleared since, and below ``root`` there.
    ``heard`` is that of the ``wire``. ``ended`` says why it ended, and the server's label then;
    ``future`` that it did, and its ``reply`` can be made, or there is ``trouble`` with that.
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
    state: State
    after: State
    kv: Kv = field(default_factory=Kv)
    key: Version = None
    decoding: bool = False
    running: bool = False
    started: bool = False
    held: bool = False
    deferred: bool = False
    watched: bool = False
    shares: bool = True
    root: Hashable = None
    cached: int | None = None
    admission_label: Version = None
    keys: list[tuple[int, Version]] = field(default_factory=list)
    labels: list[tuple[int, Version]] = field(default_factory=list)
    kept: list[KeySpan] = field(default_factory=list)
    lost_after: int | None = None
    late_by: int = 0
    duplicated: bool = False
    ahead: list[int] = field(default_factory=list)
    ahead_key: Version = None
    used: int = 0
    ended: tuple[FinishReason, Version] | None = None
    reply: Reply | None = None
    trouble: RollproofError | None = None
    wire: Wire = AT_HAND
    heard: Callable[[EngineCall], None] | None = None

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_len

    def settle(self, version: int) -> None:
        """Write down the KV that decoding under ``version`` has computed since the last time."""
        if self.decoding:
            self.kv.forward(version, len(self.ids) - 1)

    def rekey(self, version: int) -> None:
        """From here on, decode under weights ``version``."""
        if self.decoding:
            self.mark_key(key_of(version, self.kv.weights))

    def mark_key(self, key: Version) -> None:
        """The next token is sampled under ``key``."""
        self.key = key
        if not self.keys or self.keys[-1][1] != key:
            self.keys.append((self.sampled, key))

    def mark_label(self, label: Version) -> None:
        """The next token is shown under ``label``."""
        if not self.labels or self.labels[-1][1] != label:
            self.labels.append((self.sampled, label))

    def drop_kv(self, flavour: Flavour) -> None:
        """Lose the KV; ``settle`` first. Rows of sampled tokens stay where the flavour keeps them."""
        if flavour.recompute is Recompute.KEPT and self.sampled:
            self.kept = self.rows()
        self.kv.drop()
        self.decoding, self.shares = False, True

    def rows(self) -> list[KeySpan]:
        """The keys of the rows that the engine holds, over absolute positions from 0; the last
        token has none.
        """
        end = self.kept[-1].stop if self.kept else 0
        return self.kept + clipped(self.kv.spans, end, len(self.ids) - 1)


def replies_to(calls: Sequence[EngineCall], policy: CodedPolicy, flavour: Flavour) -> list[Reply]:
    """The replies of calls that ended and were settled."""
    tokens, rows = [_token_keys(call) for call in calls], [call.rows() for call in calls]
    scored = [
        i
        for i, call in enumerate(calls)
        if call.want_logprobs and (call.sampled or flavour.empty_logprobs)
    ]
    routed = [i for i, call in enumerate(calls) if _shows_routes(call, rows[i], flavour)]
    held = [rows[i][-1].stop if rows[i] else 0 for i in routed]
    hashes = hashes_of_many([call.ids for call in calls])
    logprobs = policy.logprobs_many(
        [
            (
                _versions(tokens[i], calls[i].prompt_len),
                calls[i].ids,
                calls[i].prompt_len,
                len(calls[i].ids),
            )
            for i in scored
        ],
        [hashes[i] for i in scored],
    )
    routes = policy.routes_many(
        [
            (_versions(rows[i]), calls[i].ids, min(calls[i].routes_start, stop), stop)
            for i, stop in zip(routed, held, strict=True)
        ],
        [hashes[i] for i in routed],
    )
    logprobs_of, routes_of = (
        dict(zip(scored, logprobs, strict=True)),
        dict(zip(routed, routes, strict=True)),
    )
    return [
        _reply(call, tokens[i], rows[i], logprobs_of.get(i), routes_of.get(i), policy, flavour)
        for i, call in enumerate(calls)
    ]


def _reply(
    call: EngineCall,
    keys: list[KeySpan],
    rows: list[KeySpan],
    logprobs: LogprobArray | None,
    routes: IntArray | None,
    policy: CodedPolicy,
    flavour: Flavour,
) -> Reply:
    assert call.ended is not None
    reason, label = call.ended
    start, stop = call.prompt_len, len(call.ids)
    labels = tuple(
        [
            Span(start=low, end=high, version=version)
            for low, high, version in _joined(_stretches(call.labels, stop - start))
        ]
    )
    if logprobs is not None:
        logprobs.flags.writeable = (
            call.wire is AT_HAND
        )  # what nobody writes to, a trace need not copy
    output = EngineOutput(
        token_ids=tuple(call.ids[start:]),
        logprobs=logprobs,
        routes=None if routes is None else _shown_routes(call, routes, policy, flavour),
        finish_reason=reason,
        routes_start=call.routes_start,
        version=_shown_version(flavour, labels, call.admission_label, label),
        spans=_shown_spans(flavour, labels, label),
        cached_tokens=None if _is_bare(call, flavour) else _counted(call, flavour),
        native=flavour.native[reason],
        message=(
            (flavour.abort_message if call.decoding else flavour.queued_message)
            if reason is FinishReason.ABORT
            else ""
        ),
    )
    return Reply(
        call_id=call.call_id,
        output=output,
        true_tokens=as_spans(keys, 0, stop - start),
        true_rows=as_spans(rows, 0, stop),
    )


def _token_keys(call: EngineCall) -> list[KeySpan]:
    """The keys of the sampled tokens, the first of which is at 0."""
    return [
        KeySpan(low, high, key, _NO_WEIGHTS)
        for low, high, key in _stretches(call.keys, call.sampled)
    ]


def _versions(keys: list[KeySpan], start: int = 0) -> list[VersionSpan]:
    return [(start + one.start, start + one.stop, one.key) for one in keys]


def _is_bare(call: EngineCall, flavour: Flavour) -> bool:
    """Whether the reply has not even the keys of what the call would have had."""
    return not call.decoding and not flavour.queued_abort_keeps_keys


def _shows_routes(call: EngineCall, rows: list[KeySpan], flavour: Flavour) -> bool:
    """Whether there are routes: also not where the engine holds too little to answer."""
    early = call.ended is not None and call.ended[0] is FinishReason.ABORT and not call.sampled
    return (
        call.want_routes
        and not early
        and not _is_bare(call, flavour)
        and (rows[-1].stop if rows else 0) >= len(call.ids) - 1
    )


def _shown_routes(
    call: EngineCall, routes: IntArray, policy: CodedPolicy, flavour: Flavour
) -> IntArray:
    """``(rows, layers, top_k)`` as the flavour lays them out."""
    if flavour.layer_axis is LayerAxis.MOE:
        routes = routes[:, list(policy.moe_layers)]
    kind = flavour.dtype(policy.num_experts)
    if call.wire.narrow and flavour.rows is not Rows.ALL and _fits(routes.dtype, kind):
        routes = narrow(routes, kind)
    else:
        routes = np.ascontiguousarray(routes, dtype=kind)
    if flavour.rows is Rows.ALL:
        routes = np.concatenate([routes, filler_rows(flavour.final_row, 1, routes)])
    routes.flags.writeable = flavour.writable and call.wire is AT_HAND
    return routes


def broken_off(
    call: EngineCall, version: int, policy: CodedPolicy, flavour: Flavour, label: Version
) -> Reply:
    """What a stream had brought when its server, of weights ``version``, died: an error with the
    tokens so far, and nobody has it whole.
    """
    call.settle(version)
    call.ended = (FinishReason.ABORT, label)
    (reply,) = replies_to([call], policy, flavour)
    output = replace(
        reply.output, finish_reason=FinishReason.ERROR, routes=None, native="", message=""
    )
    return replace(reply, output=output, delivered=False, true_rows=None)


def _counted(call: EngineCall, flavour: Flavour) -> int | None:
    """Tokens from the prefix cache; of a call that never ran, what the flavour says."""
    return 0 if call.cached is None and flavour.queued_counts else call.cached


def empty_abort(call_id: int, flavour: Flavour, label: Version, *, want_logprobs: bool) -> Reply:
    """The reply to a call that was turned away: an abort of zero tokens."""
    output = EngineOutput(
        token_ids=(),
        logprobs=np.zeros(0) if want_logprobs and flavour.empty_logprobs else None,
        routes=None,
        finish_reason=FinishReason.ABORT,
        version=_shown_version(flavour, (), label, label),
        spans=_shown_spans(flavour, (), label),
        cached_tokens=0 if flavour.queued_counts else None,
        native=flavour.native[FinishReason.ABORT],
    )
    return Reply(call_id=call_id, output=output, true_tokens=(), true_rows=())


def handed(output: EngineOutput) -> EngineOutput:
    """What the caller gets: equal arrays of its own, so that nothing it does to them reaches the
    trace.
    """
    routes = output.routes
    if routes is not None:
        # a read-only array is handed over as such: a view of one cannot be made writable again
        routes = routes.copy() if routes.flags.writeable else routes.view()
    return replace(
        output, logprobs=None if output.logprobs is None else output.logprobs.copy(), routes=routes
    )


def filler_rows(filler: Filler | None, count: int, like: IntArray) -> IntArray:
    """``(count, layers, top_k)`` of a declared filler, in the layout and dtype of ``like``."""
    rows = np.zeros((count, *like.shape[1:]), dtype=like.dtype)
    if filler is Filler.MINUS_ONE:
        rows[:] = -1
    elif filler is Filler.ARANGE:
        rows[:] = np.arange(like.shape[2], dtype=like.dtype)
    elif filler is Filler.PREVIOUS:
        rows[:] = like[-1:]
    return rows


def _stretches(marks: list[tuple[int, Version]], count: int) -> list[tuple[int, int, Version]]:
    """Marks as stretches ``(from, to, value)`` over ``count`` tokens; of two marks at one place the
    later counts.
    """
    if len(marks) == 1 and marks[0][0] < count:
        return [(marks[0][0], count, marks[0][1])]
    ends = [*marks, (count, None)]
    return [
        (low, min(high, count), value)
        for (low, value), (high, _) in pairwise(ends)
        if low < min(high, count)
    ]


def _joined(stretches: list[tuple[int, int, Version]]) -> list[tuple[int, int, Version]]:
    if len(stretches) < 2:
        return stretches
    out: list[tuple[int, int, Version]] = []
    for low, high, value in stretches:
        if out and out[-1][2] == value:
            out[-1] = (out[-1][0], high, value)
        else:
            out.append((low, high, value))
    return out


def _shown_version(
    flavour: Flavour, labels: tuple[Span, ...], admitted: Version, now: Version
) -> Version:
    if flavour.version_tag is VersionTag.SPANS_AND_LAST:
        return labels[-1].version if labels else now
    return {VersionTag.EMISSION: now, VersionTag.ADMISSION: admitted}.get(flavour.version_tag)


def _shown_spans(flavour: Flavour, labels: tuple[Span, ...], now: Version) -> tuple[Span, ...]:
    if not flavour.shows_spans:
        return ()
    if not labels and flavour.version_tag is VersionTag.SPANS_AND_LAST:
        return (Span(start=0, end=0, version=now),)
    return labels
