"""Known bugs of routes in a stack: rows that are lost, repeated, displaced, filled, or of another
request.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollproof.core.case import ActionKind
from rollproof.core.contract import Contract, Rows
from rollproof.core.records import EngineOutput, IntArray, Rollout
from rollproof.fakes.clients.reference_clients import (
    AsSampled,
    AsSampledTokens,
    ClientOptions,
    PartialSample,
)
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import (
    ABORTED,
    CLEAN,
    EMPTY,
    ENDING,
    SYNCED,
    act,
    case,
    request,
)
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _AllRows(AsSampled):
    """Requests all rows on every call, like clients before engines could omit the known ones."""

    def routes_start(self, sample: PartialSample) -> int:
        return 0


class _ConcatOnResume(_AllRows):
    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if output.routes is not None:
            # each reply has the rows of the whole sequence, not only of its own tokens
            sample.rows = (
                output.routes
                if sample.rows is None
                else np.concatenate([sample.rows, output.routes])
            )


class _ReplaceOnResume(_AllRows):
    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if output.routes is not None:
            # a later prefill computed these rows, with the weights of that moment
            sample.rows = output.routes[: sent + len(output.token_ids) - 1].copy()


class _SegmentFillerKept(_AllRows):
    """Has the right number of rows, but keeps the filler of each segment.

    It occurs if the engine returns a row for the last token, too.
    """

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if output.routes is None:
            return
        tail = output.routes[-len(output.token_ids) :]
        sample.rows = output.routes if sample.rows is None else np.concatenate([sample.rows, tail])

    def final_routes(self, sample: PartialSample) -> IntArray | None:
        if sample.rows is not None:
            sample.rows = sample.rows[: len(sample.ids) - 1]
        return super().final_routes(sample)


class _TorchCatOnNumpy(_AllRows):
    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if sample.rows is not None:
            # the message of torch.cat
            # whether routes are tensors or arrays depends on the engine (verl#7158)
            raise TypeError("expected Tensor as element 0 in argument 0, but got numpy.ndarray")
        super().merge_routes(sample, sent, output)


class _FailsOnEmptyAbort(AsSampled):
    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if not output.token_ids:
            # the message of unpacking an empty list of tokens and logprobs
            raise ValueError("not enough values to unpack (expected 2, got 0)")
        super().absorb(sample, sent, output)


class _LaterTurnReplaces(_AllRows):
    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        # within a turn rows are appended, at a new turn they are replaced
        if sample.turn and output.routes is not None:
            sample.rows = output.routes[: sent + len(output.token_ids) - 1].copy()
        else:
            super().merge_routes(sample, sent, output)


class _TokensCutRowsNot(AsSampled):
    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None
        # routes keep their length
        return replace(
            rollout, response_ids=rollout.response_ids[:-2], logprobs=rollout.logprobs[:-2]
        )


class _OneTokenLate(AsSampled):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        # row i is that of token i - 1
        return rows if rows is None else np.concatenate([rows[:1], rows[:-1]])


class _RowsOfAnotherRequest(AsSampled):
    """Fills each sample from the result slot of the request that ended last."""

    def __init__(self, options: ClientOptions | None = None) -> None:
        super().__init__(options)
        self._slot: IntArray | None = None

    def final_routes(self, sample: PartialSample) -> IntArray | None:
        mine = super().final_routes(sample)
        shown, self._slot = (
            (mine if self._slot is None or mine is None else self._slot[: len(mine)]),
            mine,
        )
        return shown


class _ZeroPadded(AsSampled):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is None:
            return None
        out = np.zeros_like(rows)
        # as if the last two rows had not arrived
        out[:-2] = rows[:-2]
        return out


class _ZerosForMissing(AsSampledTokens):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is not None:
            # a zero is expert 0, not a mark
            rows[-1] = 0
        return rows


class _UncapturedSuffix(AsSampled):
    """Declares a captured prefix, and returns a guess for the token that was never forwarded."""

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), rows=Rows.CAPTURED_PREFIX)

    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        return rows if rows is None else np.concatenate([rows, rows[-1:]])


class _SurplusRow(AsSampled):
    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        # the contract declares T-1 rows, so nobody expects a filler
        return rows if rows is None else np.concatenate([rows, rows[-1:]])


class _BufferRecycled(AsSampled):
    """Returns a view of a buffer that the next request writes into."""

    def __init__(self, options: ClientOptions | None = None) -> None:
        super().__init__(options)
        self._buffer: IntArray | None = None

    def final_routes(self, sample: PartialSample) -> IntArray | None:
        rows = super().final_routes(sample)
        if rows is None:
            return None
        if self._buffer is None:
            self._buffer = np.zeros((64, *rows.shape[1:]), dtype=rows.dtype)
        self._buffer[: len(rows)] = rows
        return self._buffer[: len(rows)]


class _WritesToReadOnly(AsSampled):
    """Marks the last row in the engine's own array before it copies the array."""

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if output.routes is not None:
            super().merge_routes(sample, sent, output)
            # read-only, as what np.frombuffer makes of a reply
            output.routes[-1] = 0


class _ReplyWrittenTo(_WritesToReadOnly):
    """The same client; the engine's array is writable, so nothing stops it."""


class _ReplySorted(AsSampled):
    """Sorts each row in the engine's own array, after the sample has its copy."""

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().merge_routes(sample, sent, output)
        if output.routes is not None:
            output.routes[..., ::-1].sort(axis=-1)


_TWO = (request(), request("r1", (31, 32, 33)))
_BY_TURNS = case(requests=_TWO, arrivals=(0.0, 20.0))

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="concat-on-resume",
        summary=(
            "Each resume appends the routes of the whole sequence to those of the calls before."
        ),
        refs=("verl#6029", "AReaL inf_bridge.py"),
        make=_ConcatOnResume,
        cases=(ABORTED, SYNCED),
        detected_by=("routes.rows",),
    ),
    KnownBug(
        id="replace-on-resume",
        summary=(
            "Each resume replaces the routes: tokens sampled by old weights get rows of the new"
            " weights."
        ),
        refs=("verl#6046", "verl#6029"),
        make=_ReplaceOnResume,
        cases=(SYNCED,),
        detected_by=("routes.provenance",),
    ),
    KnownBug(
        id="segment-filler-kept",
        summary=(
            "With one row a token, the filler row at the end of each segment is kept instead of the"
            " row that the next call computes."
        ),
        refs=("verl#7158",),
        make=_SegmentFillerKept,
        cases=(case(act(ActionKind.ABORT, 3), flavour="rows-T"),),
        detected_by=("routes.captured",),
    ),
    KnownBug(
        id="later-turn-replaces",
        summary="In a conversation, the routes of each turn replace those of all turns before.",
        refs=("verl#6054", "verl#5825", "verl#7222"),
        make=_LaterTurnReplaces,
        cases=(
            case(
                act(ActionKind.SYNC, 3),
                model=ENDING,
                requests=(request(max_tokens=24, turns=((21, 22), (23, 24))),),
                seed=1,
            ),
        ),
        detected_by=("routes.provenance",),
    ),
    KnownBug(
        id="torch-cat-on-numpy",
        summary="Resumed routes are concatenated with torch.cat, which raises on numpy arrays.",
        refs=("verl#7158", "ROLL user_defined_rollout_loop.py"),
        make=_TorchCatOnNumpy,
        cases=(ABORTED,),
        detected_by=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="fails-on-empty-abort",
        summary="An abort before the first token makes the client raise an error.",
        refs=("verl#5936", "vime#49"),
        make=_FailsOnEmptyAbort,
        cases=(EMPTY,),
        detected_by=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="writes-to-read-only",
        summary="The client writes into the engine's array, which is read-only.",
        refs=("verl#5519",),
        make=_WritesToReadOnly,
        cases=(case(flavour="sglang"),),
        detected_by=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="reply-written-to",
        summary="The client writes into the engine's array, which is writable here.",
        refs=("verl#5519",),
        make=_ReplyWrittenTo,
        cases=(CLEAN,),
        detected_by=("routes.reply-untouched",),
    ),
    KnownBug(
        id="reply-sorted",
        summary="The experts of each row are sorted in the engine's own array.",
        refs=("verl#5519",),
        make=_ReplySorted,
        cases=(CLEAN,),
        detected_by=("routes.reply-untouched",),
    ),
    KnownBug(
        id="tokens-cut-rows-not",
        summary="The response is cut to its length, but its routes are not.",
        refs=("verl#6027", "verl#6089", "miles#1069"),
        make=_TokensCutRowsNot,
        cases=(ABORTED,),
        detected_by=("routes.rows",),
        may_fail=("stitch.tokens",),
    ),
    KnownBug(
        id="surplus-row",
        summary=(
            "A row is repeated at the end for the token that was never forwarded, although the"
            " contract declares none."
        ),
        refs=("slime#1045", "miles sglang_rollout.py"),
        make=_SurplusRow,
        cases=(CLEAN,),
        detected_by=("routes.rows",),
    ),
    KnownBug(
        id="one-token-late",
        summary="Every row is at the position of the next token.",
        refs=("verl#6473", "verl#7075"),
        make=_OneTokenLate,
        cases=(CLEAN, ABORTED),
        detected_by=("routes.position",),
    ),
    KnownBug(
        id="rows-of-another-request",
        summary="A result slot is read after another request has written it.",
        refs=("sglang#34319",),
        make=_RowsOfAnotherRequest,
        cases=(_BY_TURNS,),
        detected_by=("routes.isolation",),
    ),
    KnownBug(
        id="zero-padded",
        summary="Missing route rows are filled with zeros: expert 0, top_k times.",
        refs=("verl agent_loop.py (0.9.1)", "ROLL functionals.py", "slime#941"),
        make=_ZeroPadded,
        cases=(ABORTED,),
        detected_by=("routes.captured",),
    ),
    KnownBug(
        id="zeros-for-missing",
        summary="The row of the token that was never forwarded is zeros, not the declared filler.",
        refs=("verl#7841", "prime-rl _pad_routed_experts"),
        make=_ZerosForMissing,
        cases=(CLEAN,),
        detected_by=("routes.filler",),
    ),
    KnownBug(
        id="uncaptured-suffix",
        summary="A row that was never captured is returned as part of the captured prefix.",
        refs=("SkyRL#1908",),
        make=_UncapturedSuffix,
        cases=(CLEAN,),
        detected_by=("routes.filler",),
    ),
    KnownBug(
        id="buffer-recycled",
        summary="The sample contains a view of a buffer that the next request overwrites.",
        refs=("sglang#34319",),
        make=_BufferRecycled,
        cases=(_BY_TURNS,),
        detected_by=("routes.handed-over",),
    ),
)
