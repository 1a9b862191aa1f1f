"""Route checks of presence, count, shape and type: what each finds, what it says, and what it
leaves alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.core.events.rollout import Observation
from rollproof.core.records import FinishReason
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Judgement
from rollproof.verification.traces import judge
from tests.support.made_up_samples import hint_of_made_up
from tests.support.routed_requests import REGISTRY, RoutedRequest, Segment, failing, only_finding
from tests.support.trace_builder import TraceBuilder, coded_rows, contract


def _joined(story: RoutedRequest) -> np.ndarray:
    return np.concatenate(
        [rows for i in range(len(story.segments)) if (rows := story.returned(i)) is not None]
    )


def test_concatenation_on_resume_is_told_so_that_a_stack_developer_understands_it() -> None:
    """The most frequent fault of the field: whole arrays joined. Sizes, cause, place, remedy and
    reference are in the message.
    """
    finding = only_finding(RoutedRequest().judged(_joined(RoutedRequest())), "routes.rows")
    assert finding.title == "16 route rows for a sample of 10 tokens"
    assert (
        finding.expected
        == "9 rows (one per token but the last, which was sampled and never forwarded) for 5 prompt"
        " tokens and 5 response tokens: the contract declares rows='T-1'"
    )
    assert (
        finding.observed
        == "16 = 7 of segment 0 + 9 of segment 1: segment 1's entire array was appended to"
        " segment 0's. A call returns rows for the entire sequence that it sends, so positions"
        " 0-6 are in the sample twice, and every row from 7 on belongs to another token"
    )
    assert finding.where == {"request": "r0", "segment": 1, "position": 7}
    assert "`new[len(rows):]`" in finding.hint
    assert "verl #6029" in finding.hint


def test_concatenation_of_three_segments_names_the_first_repetition() -> None:
    """With several resumes the sum shows every array, and the place is where the first repetition
    begins.
    """
    story = RoutedRequest(segments=(Segment(2, 1), Segment(0, 1), Segment(2, 2), Segment(1, 3)))
    finding = only_finding(story.judged(_joined(story)), "routes.rows")
    assert finding.observed.startswith(
        "23 = 6 of segment 0 + 8 of segment 2 + 9 of segment 3: segment 2's entire array"
    )
    assert finding.where["position"] == 6


@pytest.mark.parametrize(
    ("changes", "delta", "words"),
    [
        ({}, 1, "one more than tokens were forwarded"),
        ({}, -3, "3 rows missing"),
        ({"rows": "T", "final_row": "arange"}, -1, "the filler row of the last token is missing"),
        ({"rows": "T", "final_row": "arange"}, 3, "3 rows too many"),
    ],
)
def test_a_wrong_count_is_explained(changes: dict[str, str], delta: int, words: str) -> None:
    """T against T-1 is distinguished from missing or surplus rows."""
    story = RoutedRequest(changes=changes)
    rows = story.good()
    wrong = rows[:delta] if delta < 0 else np.concatenate([rows, rows[-1:].repeat(delta, axis=0)])
    finding = only_finding(story.judged(wrong), "routes.rows")
    assert words in finding.observed
    assert f"too {'few' if delta < 0 else 'many'} route rows" == finding.kind


def test_a_row_too_many_is_that_of_the_last_token() -> None:
    """An engine was called, and its T-1 rows got one more."""
    story = RoutedRequest()
    rows = np.concatenate([story.good(), story.good()[-1:]])
    finding = only_finding(story.judged(rows), "routes.rows")
    assert finding.hint.startswith("Drop the row of the last token, or declare rows='T'")


def test_a_row_too_many_of_a_cached_answer_is_not_that_of_the_last_token() -> None:
    """No engine was called: the rows are those of another sequence, and dropping one is no help."""
    finding = hint_of_made_up("routes.rows", lambda rows: np.concatenate([rows, rows[:1]]))
    assert finding.observed == "9 rows in a sample for which no engine was called"
    assert "stitch.sampled-by-engine" in finding.hint
    assert "Drop the row of the last token" not in finding.hint


def test_a_hole_that_shifts_later_rows_is_a_wrong_count() -> None:
    """A middle segment without routes, skipped by a merge by tail: the last call had its rows, so
    nothing excuses the hole.
    """
    story = RoutedRequest(segments=(Segment(3, 1), Segment(2, 1, routes=False), Segment(2, 1)))
    last = story.returned(2)
    assert last is not None
    merged = np.concatenate([story.rows(0, 7, 1), last[-2:]])
    assert "no routes for segment 1" in only_finding(story.judged(merged), "routes.rows").observed


def test_rows_that_were_asked_for_too_late_are_told_from_rows_that_an_engine_did_not_return() -> (
    None
):
    """A resume requests rows from the first token to be sampled: the row of the token before it is
    lost.
    """
    story = RoutedRequest(segments=(Segment(2, 1), Segment(1, 1)))
    ids, builder = story.ids, TraceBuilder(story.contract)
    builder.submit("r0", ids[:5], max_tokens=3)
    builder.weights(1)
    builder.reply(
        builder.call(ids[:5], "r0"),
        ids[5:7],
        "abort",
        version=1,
        output={"routes": story.returned(0)},
    )
    builder.reply(
        builder.call(ids[:7], "r0"),
        ids[7:],
        "length",
        version=1,
        output={"routes": story.rows(7, 7, 1), "routes_start": 7},
    )
    builder.result(ids[5:], "r0", ids[:5], routes=story.returned(0))
    finding = only_finding(judge(builder.trace(), REGISTRY), "routes.rows")
    assert (
        "6 rows; segment 1's were requested from position 7 on, where there are none"
        == finding.observed
    )
    assert 1 == finding.where["segment"]


def test_rows_of_the_first_segment_or_of_the_response_alone_are_recognised() -> None:
    """A resume that forgets the new rows, and a stack that drops the prompt's rows without
    declaring the position of row 0.
    """
    story = RoutedRequest()
    assert (
        "the array of segment 0 alone"
        in only_finding(story.judged(story.returned(0)), "routes.rows").observed
    )
    finding = only_finding(story.judged(story.good()[5:]), "routes.rows")
    assert "4 rows: those of the response alone; row 0 belongs to position 5" == finding.observed
    assert 5 == finding.where["position"]


@pytest.mark.parametrize(
    ("left_out", "words", "position"),
    [
        (slice(3, 4), "8 rows: those of position 3 are missing, and the rows after", 3),
        (slice(1, 6), "4 rows: those of positions 1-5 are missing, and the rows after", 1),
        (slice(0, 5), "4 rows: those of the response alone; row 0 belongs to position 5", 5),
        (slice(4, 9), "4 rows: 5 rows missing", 4),
    ],
)
def test_missing_rows_are_found_by_what_is_there(
    left_out: slice, words: str, position: int
) -> None:
    """As many rows as the response alone has may be others: the values tell which are missing."""
    story = RoutedRequest()
    rows = np.delete(story.good(), left_out, axis=0)
    finding = only_finding(story.judged(rows), "routes.rows")
    assert finding.observed.startswith(words)
    assert position == finding.where["position"]


def test_an_array_of_one_row_is_repeated_at_position_0() -> None:
    """A prompt of one token, and a first call that sampled one."""
    story = RoutedRequest(segments=(Segment(1, 1), Segment(2, 2)), prompt=1)
    finding = only_finding(story.judged(_joined(story)), "routes.rows")
    assert "so position 0 is in the sample twice, and every row from 1 on" in finding.observed


def test_segments_without_routes_are_listed() -> None:
    """One in the singular, two in the plural."""
    for routes, words in (
        ((True, False, True), "segment 1"),
        ((False, False, True), "segments 0, 1"),
    ):
        story = RoutedRequest(segments=[Segment(2, 1, routes=has_routes) for has_routes in routes])
        finding = only_finding(story.judged(story.rows(0, 8, 1)), "routes.rows")
        assert f"8 rows; the engine returned no routes for {words}" == finding.observed


def test_rows_must_be_cut_with_the_response() -> None:
    """A cut response with the rows of all tokens is found; T or T-1 rows of what is left are fine:
    the last one is a capture.
    """
    story = RoutedRequest(segments=(Segment(6),))
    finding = only_finding(story.judged(story.good(), keep=3), "routes.rows")
    assert (
        finding.observed
        == "10 rows: 2 tokens of the response were cut off, and their rows were not"
    )
    assert "verl #6027" in finding.hint
    for rows in (7, 8):
        judged = story.judged(story.good()[:rows], keep=3)
        assert failing(judged) == set()
        assert judged["routes.rows"].exercised == {"cut samples": 1}


def test_rows_are_cut_with_the_response_wherever_they_begin() -> None:
    """The sample has no rows of its first two tokens."""
    story = RoutedRequest(segments=(Segment(6),))
    finding = only_finding(story.judged(story.good()[2:], keep=3, routes_start=2), "routes.rows")
    assert (
        finding.observed == "8 rows: 2 tokens of the response were cut off, and their rows were not"
    )


def test_a_type_that_is_wide_enough_is_not_blamed_for_ids_that_wrapped() -> None:
    """int16 holds the largest of 32,768 ids; uint8, through which they went, does not."""
    story = RoutedRequest(
        changes={
            "num_experts": 32768,
            "num_layers": 1,
            "moe_layers": (0,),
            "dtype": "int16",
        }
    )
    finding = only_finding(
        story.judged(story.good().astype(np.uint8).astype(np.int16)), "routes.dtype"
    )
    assert finding.observed.startswith("uint8 holds at most 255; ids wrapped in")


def _last_word(rows: int, declared: str = "T-1") -> Judgement:
    """A turn of one token after a prompt of two, the environment's two tokens, and a call that was
    aborted before its first one.
    """
    builder = TraceBuilder(
        contract(
            resume="none",
            abort_surfaces=True,
            rows=declared,
            final_row="arange" if declared == "T" else None,
        )
    )
    builder.weights(0).submit("r0", (1, 2), max_tokens=9, turns=((90, 91),))
    builder.reply(builder.call((1, 2)), (5,), "stop", prompt_len=2)
    builder.add(Observation(request_id="r0", token_ids=(90, 91)))
    builder.reply(builder.call((1, 2, 5, 90, 91)), (), "abort")
    response = (5, 90, 91)
    builder.result(response, routes=coded_rows(0, rows, 0), finish_reason=FinishReason.ABORT)
    return judge(builder.trace(), REGISTRY)


def test_the_environments_last_word_needs_no_rows() -> None:
    """A surfaced sample may end in tokens that no forward saw; T-1 rows of it are as good, fewer
    than were captured are not.
    """
    for rows in (2, 3, 4, 5):
        judged = _last_word(rows)
        assert (Verdict.PASS, {"resumed samples": 1}) == (
            judged["routes.rows"].verdict,
            dict(judged["routes.rows"].exercised),
        )
    assert (
        only_finding(_last_word(1), "routes.rows").title == "1 route row for a sample of 5 tokens"
    )
    assert (
        only_finding(_last_word(6), "routes.rows").title == "6 route rows for a sample of 5 tokens"
    )


def test_a_sample_with_an_offset_is_counted_from_there() -> None:
    """``routes_start`` is the position of row 0: the rows before it are not missing, and the others
    are compared in place.
    """
    story = RoutedRequest()
    judged = story.judged(story.good()[4:], routes_start=4)
    assert failing(judged) == set()
    assert judged["routes.position"].exercised == {"rows compared": 5}


@pytest.mark.parametrize(("begins", "rows"), [(3, 6), (6, 3), (1, 8)])
def test_rows_that_begin_elsewhere_than_declared_are_named(begins: int, rows: int) -> None:
    """The content says where the rows begin: the end has neither a row too many nor too few."""
    story = RoutedRequest()
    finding = only_finding(story.judged(story.good()[begins:], routes_start=4), "routes.rows")
    assert finding.observed == (
        f"{rows} rows, those from position {begins} on; routes_start says that they begin at"
        " position 4"
    )
    assert finding.where == {"request": "r0", "position": 4}
    assert "routes_start + i" in finding.hint


def test_a_row_too_many_after_an_offset_is_that_of_the_last_token() -> None:
    """The same count with another cause: the rows begin where they should, and one was added."""
    story = RoutedRequest()
    rows = np.concatenate([story.good()[4:], story.good()[-1:]])
    finding = only_finding(story.judged(rows, routes_start=4), "routes.rows")
    assert finding.observed.startswith("6 rows, one more than tokens were forwarded")
    assert finding.hint.startswith("Drop the row of the last token")


def test_a_captured_prefix_may_end_anywhere() -> None:
    """SkyRL hands over the rows that it has; more rows than were captured are not a prefix."""
    story = RoutedRequest(changes={"rows": "captured-prefix"})
    for count in (0, 4, 9):
        assert failing(story.judged(story.good()[:count])) == (
            set() if count else {"routes.presence"}
        )
    more = only_finding(story.judged(story.good().repeat(2, axis=0)), "routes.rows")
    assert more.expected.startswith("at most 10 rows for ")
    surplus = np.concatenate([story.good(), story.good()[:1] * 0])
    assert "SkyRL #1908" in only_finding(story.judged(surplus), "routes.filler").hint


@pytest.mark.parametrize("prompt", [1, 5])
def test_the_rows_of_a_response_of_one_token_are_none(prompt: int) -> None:
    """A stack that delivers the rows of the response alone has an empty array for it; for more
    tokens it has rows.
    """
    for tokens, missing in ((1, set()), (2, {"routes.rows"})):
        story = RoutedRequest(segments=(Segment(tokens),), prompt=prompt)
        right = story.good()[prompt:]
        assert tokens - 1 == len(right)
        assert set() == failing(story.judged(right, routes_start=prompt))
        assert missing == failing(story.judged(right[:0], routes_start=prompt))


def test_missing_routes_say_who_lost_them() -> None:
    """Dropped by the stack, never requested, or silently missing from the engine: three causes,
    three messages.
    """
    story = RoutedRequest()
    dropped = only_finding(story.judged(None), "routes.presence")
    assert dropped.observed == "routes: none; the engine returned them, and the stack dropped them"
    for requested, words in ((False, "the call did not"), (True, "delivered nevertheless")):
        builder = TraceBuilder(contract()).submit()
        builder.reply(builder.call((1, 2), want_routes=requested), (3, 4)).result((3, 4))
        assert words in only_finding(judge(builder.trace(), REGISTRY), "routes.presence").observed
    untold = judge(TraceBuilder(contract()).submit().result((3, 4)).trace(), REGISTRY)
    assert "no engine call, so it does not show" in only_finding(untold, "routes.presence").observed


def test_the_first_call_that_did_not_request_routes_is_named() -> None:
    """Only if that is the cause."""
    builder = TraceBuilder(contract()).submit(max_tokens=8)
    ids: tuple[int, ...] = (1, 2)
    for number, requested in enumerate((True, False, False)):
        call = builder.call(ids, want_routes=requested)
        builder.reply(call, (3 + number,), "abort" if number < 2 else "length")
        ids += (3 + number,)
    finding = only_finding(judge(builder.result(ids[2:]).trace(), REGISTRY), "routes.presence")
    assert {"request": "r0", "call": 2} == finding.where
    dropped = only_finding(RoutedRequest().judged(None), "routes.presence")
    assert {"request": "r0"} == dropped.where


def test_a_caller_that_requested_no_routes_gets_none() -> None:
    """The contract allows them, and nobody asked."""
    builder = TraceBuilder(contract()).submit(want_routes=False)
    builder.reply(builder.call((1, 2), want_routes=False), (3, 4)).result((3, 4))
    judged = judge(builder.trace(), REGISTRY)
    assert set() == failing(judged)
    assert "requested routes" in judged["routes.presence"].reason


@pytest.mark.parametrize(
    ("segments", "excused"),
    [
        ((Segment(3), Segment(2, routes=False)), True),
        ((Segment(3, routes=False), Segment(2)), False),
        ((Segment(3), Segment(0, routes=False)), False),
        ((Segment(3, routes=False), Segment(0)), True),
    ],
)
def test_an_aborted_sample_may_lack_routes_if_its_last_tokens_have_none(
    segments: tuple[Segment, ...], excused: bool
) -> None:
    """A reply without tokens is not the last of them."""
    story = RoutedRequest(segments=segments, changes={"abort_surfaces": True})
    judged = story.judged(None, finish_reason=FinishReason.ABORT)
    assert (set() if excused else {"routes.presence"}) == failing(judged)
    complete = story.judged(None, finish_reason=FinishReason.LENGTH)
    assert {"routes.presence"} == failing(complete)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.LENGTH])
def test_an_empty_sample_needs_no_routes(reason: FinishReason) -> None:
    """Nothing was sampled, or the engine returned nothing for an aborted sample: absence is no
    fault, and no pass either.
    """
    builder = TraceBuilder(contract()).submit()
    builder.reply(builder.call((1, 2)), (), "abort").result((), finish_reason=reason)
    judged = judge(builder.trace(), REGISTRY)
    assert failing(judged) == set()
    assert judged["routes.presence"].verdict is Verdict.UNKNOWN


def test_aborted_tokens_without_routes_are_no_fault_where_the_abort_is_shown() -> None:
    """SGLang answers an abort in the queue, after a retract, with tokens and no routes; the sample
    says that it was aborted.
    """
    builder = TraceBuilder(contract(abort_surfaces=True)).submit()
    builder.reply(builder.call((1, 2)), (3, 4), "abort").result(
        (3, 4), finish_reason=FinishReason.ABORT
    )
    assert failing(judge(builder.trace(), REGISTRY)) == set()


def test_no_check_of_routes_applies_to_a_stack_without_routes() -> None:
    """rows='none' rules the family out, with the reason."""
    builder = TraceBuilder(contract(rows="none")).submit()
    builder.reply(builder.call((1, 2)), (3,)).result((3,))
    judged = judge(builder.trace(), REGISTRY)
    assert {Verdict.NOT_APPLICABLE} == {result.verdict for result in judged.results}
    assert "rows='none'" in judged["routes.rows"].reason


def test_a_wrong_shape_is_explained_by_axis_or_top_k() -> None:
    """A missing dense column is distinguished from a top-k that was inferred from the size of a
    buffer.
    """
    story = RoutedRequest(changes={"num_layers": 4, "moe_layers": (1, 2, 3)})
    axis = only_finding(story.judged(story.good()[:, 1:]), "routes.shape")
    assert (axis.expected, axis.observed) == (
        "(rows, 4, 2): layer_axis='all', top_k=2",
        "(9, 3, 2)",
    )
    assert "counts MoE layers only" in axis.hint
    assert "verl #5037" in axis.hint
    doubled = only_finding(story.judged(story.good().repeat(2, axis=2)), "routes.shape")
    assert "top-k * k" in doubled.hint
    every = RoutedRequest(changes={"num_layers": 4, "moe_layers": (1, 2, 3), "layer_axis": "moe"})
    wide = only_finding(every.judged(np.zeros((9, 4, 2), dtype=np.uint8)), "routes.shape")
    assert "counts all layers" in wide.hint
    fewer = only_finding(story.judged(story.good()[:, 2:]), "routes.shape")
    assert (
        "Read layers and top_k from the model config, never from the size of a buffer."
        == fewer.hint
    )


def test_an_empty_list_has_too_few_rows_and_no_shape() -> None:
    """Routes that a stack delivers as [] have neither layers nor a type that could be wrong."""
    story = RoutedRequest(changes={"dtype": "int32"})
    judged = story.judged(np.zeros((0, 0, 0), np.int64))

    assert {"routes.rows"} == failing(judged)
    for check_id in ("routes.shape", "routes.dtype"):
        assert Verdict.UNKNOWN is judged[check_id].verdict
        assert "the routes are an empty list" == judged[check_id].reason


def test_ids_that_wrapped_are_blamed_on_the_type_alone() -> None:
    """300 experts in uint8: rows differ, cells repeat, and the one message is about the type."""
    story = RoutedRequest(changes={"num_experts": 300, "top_k": 3, "dtype": "uint16"}, seed=3)
    finding = only_finding(story.judged(story.good().astype(np.uint8)), "routes.dtype")
    assert finding.title == "uint8 does not hold every expert id"
    assert finding.expected == "a type that holds ids up to 299 (300 experts)"
    assert "ids wrapped in" in finding.observed
    assert "verl #5240" in finding.hint
    wrong = np.flatnonzero((story.good() > 255).any(axis=(1, 2)))
    assert {"request": "r0", "position": wrong[0]} == finding.where


def test_ids_that_wrapped_on_the_way_through_a_narrow_type_are_found_in_a_wide_one() -> None:
    """uint16 to int16 and back to int32: the delivered type is wide enough, and ids above 32767 are
    gone.
    """
    story = RoutedRequest(
        changes={"num_experts": 40000, "top_k": 2, "dtype": "uint16|int32"}, seed=1
    )
    finding = only_finding(
        story.judged(story.good().astype(np.int16).astype(np.int32)), "routes.dtype"
    )
    assert finding.observed.startswith("int16 holds at most 32767; ids wrapped in")


def test_a_declared_type_that_is_too_narrow_is_found_before_any_id_wraps() -> None:
    """The type is judged by num_experts, not by the ids that happened to occur."""
    small = RoutedRequest(changes={"num_experts": 8, "dtype": "uint8"})
    wide = RoutedRequest(changes={"num_experts": 300, "dtype": "uint8"})
    builder = TraceBuilder(wide.contract)
    small.record_in(builder, small.good())
    assert failing(judge(builder.trace(), REGISTRY)) == {"routes.dtype"}


@pytest.mark.parametrize(("experts", "found"), [(256, 0), (257, 1)])
def test_a_type_must_hold_the_last_expert(experts: int, found: int) -> None:
    """Ids begin with 0, so that uint8 holds those of 256 experts."""
    story = RoutedRequest(changes={"num_experts": experts, "top_k": 2, "dtype": "uint8"})
    rows = RoutedRequest(changes={"num_experts": 200, "top_k": 2, "dtype": "uint8"}).good()
    builder = TraceBuilder(story.contract)
    RoutedRequest(changes={"num_experts": 200, "top_k": 2, "dtype": "uint8"}).record_in(
        builder, rows
    )
    result = judge(builder.trace(), REGISTRY)["routes.dtype"]
    assert found == result.found


def test_minus_one_needs_a_signed_type_only_if_there_is_filler() -> None:
    """Every row was captured."""
    story = RoutedRequest(changes={"filler": "minus-one", "dtype": "uint8|int16"})
    assert set() == failing(story.judged(story.good()))


def test_another_type_than_declared_is_a_finding() -> None:
    """int64 holds everything, and a decoder that was promised int32 misreads it."""
    story = RoutedRequest(changes={"dtype": "int32"})
    finding = only_finding(story.judged(story.good().astype(np.int64)), "routes.dtype")
    assert (finding.expected, finding.observed) == ("int32, as the contract declares", "int64")


def test_read_only_arrays_and_views_are_as_good_as_any() -> None:
    """What decoders hand out: read-only, not contiguous, another byte order."""
    story = RoutedRequest(changes={"dtype": "int32"})
    rows = story.good()
    rows.flags.writeable = False
    assert failing(story.judged(rows)) == set()
    assert failing(story.judged(np.asfortranarray(rows))) == set()
    assert failing(story.judged(rows.astype(">i4"))) == set()


def test_rows_of_a_stripped_stop_token_are_not_a_row_too_many() -> None:
    """The response lacks its last token, and the rows are those of all tokens with one for the
    last: to drop a row would hide the loss.
    """
    story = RoutedRequest()
    rows = story.good()
    wrong = np.concatenate([rows, rows[-1:]])
    short = only_finding(story.judged(wrong, keep=4), "routes.rows")
    assert short.observed.startswith("10 rows; the response lacks 1 token that an engine returned")
    assert "stop tokens included" in short.hint
    complete = only_finding(story.judged(wrong), "routes.rows")
    assert complete.hint.startswith("Drop the row of the last token")


@pytest.mark.parametrize(("first", "kept", "found"), [((5, 6), (), 0), ((3, 5, 6), (3,), 1)])
def test_a_sample_of_which_the_stack_cut_all_needs_no_routes(
    first: tuple[int, ...], kept: tuple[int, ...], found: int
) -> None:
    """It cut what the engine sampled at stop sequences of its own; only answers are left."""
    builder = TraceBuilder(
        contract(multi_turn=True, own_stops={"sequences": ((5, 6),), "kept": False})
    )
    builder.weights(0).submit("r0", (1, 2), 8, turns=((7, 7),))
    builder.reply(builder.call((1, 2), max_tokens=8), first, "length")
    builder.add(Observation(request_id="r0", token_ids=(7, 7)))
    sent = (1, 2, *kept, 7, 7)
    builder.reply(builder.call(sent, max_tokens=8), (5, 6), "length")
    builder.result((*kept, 7, 7), finish_reason=FinishReason.STOP)
    result = judge(builder.trace(), REGISTRY)["routes.presence"]
    assert found == result.found
    assert ("the stack cut all" in result.reason) == (not found)
