"""Rows, parts, spans and streams of replies: each fault on both sides of its border, with the whole
finding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.contract import Rows, Versions
from rollproof.core.engine_contract import ReplyKey, RoutesSwitch, StreamMode
from rollproof.core.events.rollout import Call, Chunk, Reply
from rollproof.core.records import Span
from rollproof.invariants import default_registry
from rollproof.invariants.engine.engine_replies import is_served, refusal_of
from rollproof.judging.checks import Verdict
from tests.support.scripted_engine import call, engine_contract, judged, reference, reply, texts


def _reply(made: Call, tokens: int = 4, reason: str = "length", **changes: Any) -> Reply:
    return reply(made, reference(made, tokens), reason, **changes)


def _span(start: int, end: int, version: int) -> Span:
    return Span(start=start, end=end, version=version)


@pytest.mark.parametrize(
    ("rows", "start", "reason", "by", "words"),
    [
        ("T-1", 0, "length", 1, "6 rows: 3 prompt + 4 sampled tokens - 1"),
        ("T-1", 0, "abort", -1, "6 rows: 3 prompt + 4 sampled tokens - 1"),
        ("T-1", 1, "stop", 1, "5 rows: 3 prompt + 4 sampled tokens - 1 - 1 (offset)"),
        ("T-1", 3, "length", -1, "3 rows: 3 prompt + 4 sampled tokens - 1 - 3 (offset)"),
        ("T", 0, "length", -1, "7 rows: 3 prompt + 4 sampled tokens"),
        ("T", 2, "abort", 1, "5 rows: 3 prompt + 4 sampled tokens - 2 (offset)"),
    ],
)
def test_a_reply_has_a_row_for_each_forwarded_token(
    rows: str, start: int, reason: str, by: int, words: str
) -> None:
    """From the offset on, also if the call was aborted; one too many or too few is a finding."""
    made = call(routes_start=start)
    expected = reference(made)
    number = int(words.split()[0])
    kind = "aborted" if reason == "abort" else "finished"
    filler = {"final_row": "zeros"} if Rows(rows) is Rows.ALL else {}
    for length in (number, number + by):
        routes = np.resize(expected.routes, (length, 3, 2))
        result = judged(
            "engine.rows", made, reply(made, expected, reason, routes=routes), rows=rows, **filler
        )
        assert {f"rows of {kind} calls": 1} == dict(result.exercised)
        assert (length != number) == bool(result.findings)
    (finding,) = result.findings
    plural = "s" * (number + by != 1)
    assert (
        "a reply has another number of rows than tokens were forwarded",
        words,
        f"{number + by} row{plural}, in a reply that ended by {reason}",
        {"call": 1, "server": "e0"},
    ) == texts(finding)


@pytest.mark.parametrize("changes", [{"routes": None}, {"token_ids": ()}])
def test_rows_are_counted_where_there_are_rows_and_tokens(changes: dict[str, Any]) -> None:
    """The other parts of the family say what is missing."""
    made = call()
    result = judged("engine.rows", made, _reply(made, **changes))
    assert ({}, ()) == (dict(result.exercised), result.findings)


@pytest.mark.parametrize(
    ("reason", "tokens", "present", "counter", "expected", "observed"),
    [
        ("length", 4, "logprobs routes", "that ended by itself", "", ""),
        ("abort", 4, "logprobs", "aborted after a token", "", ""),
        ("abort", 0, "cached", "aborted before the first token", "", ""),
        ("abort", 0, "", "aborted before the first token", "", ""),
        (
            *("length", 4, "routes", "that ended by itself"),
            "logprobs, routes, of a call that ended by itself",
            "routes",
        ),
        (
            *("stop", 4, "logprobs routes spans", "that ended by itself"),
            "logprobs, routes, of a call that ended by itself",
            "logprobs, routes, spans",
        ),
        (
            *("abort", 4, "logprobs routes", "aborted after a token"),
            "logprobs, of a call that was aborted after a token",
            "logprobs, routes",
        ),
        (
            *("abort", 4, "", "aborted after a token"),
            "logprobs, of a call that was aborted after a token",
            "nothing",
        ),
        (
            *("abort", 0, "logprobs", "aborted before the first token"),
            "cached or nothing, of a call that was aborted before the first token",
            "logprobs",
        ),
    ],
)
def test_a_reply_has_the_parts_that_are_declared_for_its_end(
    reason: str, tokens: int, present: str, counter: str, expected: str, observed: str
) -> None:
    """A call that never ran has either of two forms."""
    made = call()
    terms = {
        "keys_finished": (ReplyKey.LOGPROBS, ReplyKey.ROUTES),
        "keys_aborted": (ReplyKey.LOGPROBS,),
        "keys_early": (ReplyKey.CACHED,),
        "keys_queued": (),
    }
    result = judged("engine.parts", made, _parts(made, tokens, reason, present), terms=terms)
    assert {f"replies {counter}": 1} == dict(result.exercised)
    if not expected:
        assert () == result.findings
        return
    (finding,) = result.findings
    place = {"call": 1, "server": "e0"}
    title = "a reply lacks declared parts, or has undeclared ones"
    assert (title, expected, observed, place) == texts(finding)


def _parts(made: Call, tokens: int, reason: str, present: str) -> Reply:
    missing: dict[str, Any] = {
        key: None for key in ("logprobs", "routes") if key not in present.split()
    }
    spans = (_span(0, tokens, 0),) if "spans" in present else ()
    cached = 0 if "cached" in present else None
    return _reply(made, tokens, reason, spans=spans, cached_tokens=cached, **missing)


@pytest.mark.parametrize("switch", RoutesSwitch)
@pytest.mark.parametrize("wanted", [True, False])
def test_routes_are_compared_where_they_were_requested(switch: RoutesSwitch, wanted: bool) -> None:
    """By the call, or by the only switch of the engine; logprobs by the call alone."""
    made = call(want_routes=wanted, want_logprobs=wanted)
    requested = wanted or switch is RoutesSwitch.ENGINE
    for present, lost in (("routes", wanted), ("logprobs", requested), ("logprobs routes", False)):
        result = judged(
            "engine.parts",
            made,
            _parts(made, 4, "length", present),
            terms={"routes_switch": switch},
        )
        assert lost == bool(result.findings), present
    dense = judged(
        "engine.parts",
        made,
        _parts(made, 4, "length", "logprobs"),
        terms={"routes_switch": switch},
        **_NO_ROUTES,
    )
    assert () == dense.findings


_NO_ROUTES = {
    "rows": "none",
    "layer_axis": None,
    "num_layers": None,
    "moe_layers": None,
    "num_experts": None,
    "top_k": None,
    "filler": None,
    "dtype": None,
    "provenance": None,
}


@pytest.mark.parametrize("switch", RoutesSwitch)
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("returned", [True, False])
def test_routes_are_returned_to_the_calls_that_requested_them(
    switch: RoutesSwitch, wanted: bool, returned: bool
) -> None:
    """To all if the engine has one switch for all."""
    made = call(want_routes=wanted)
    answer = _reply(made, **({} if returned else {"routes": None}))
    result = judged("engine.opt-in", made, answer, terms={"routes_switch": switch})
    words = "calls that request routes" if wanted else "calls that do not request routes"
    assert {words: 1} == dict(result.exercised)
    expected = wanted or switch is RoutesSwitch.ENGINE
    if expected == returned:
        assert () == result.findings
        return
    (finding,) = result.findings
    assert (
        "a call that requested routes got none"
        if expected
        else "routes were returned to a call that did not request them",
        f"{'routes' if expected else 'no routes'}: the engine declares routes_switch='{switch}'",
        "no routes" if expected else "rows of shape (6, 3, 2)",
        {"call": 1, "server": "e0"},
    ) == texts(finding)


@pytest.mark.parametrize(
    ("reason", "tokens", "keys", "judged_of"),
    [
        ("length", 4, (), True),
        ("abort", 4, (ReplyKey.ROUTES,), True),
        ("abort", 4, (ReplyKey.LOGPROBS,), False),
        ("length", 0, (), False),
    ],
)
def test_routes_of_an_abort_are_expected_if_they_are_declared(
    reason: str, tokens: int, keys: tuple[ReplyKey, ...], judged_of: bool
) -> None:
    """engine.parts judges an abort that has none by declaration."""
    made = call()
    answer = _reply(made, tokens, reason, routes=None)
    result = judged("engine.opt-in", made, answer, terms={"keys_aborted": keys})
    assert (judged_of, judged_of) == (bool(result.exercised), bool(result.findings))


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ("0-4", False),
        ("0-1 1-4", False),
        ("0-1 1-3 3-4", False),
        ("1-4", True),
        ("0-3", True),
        ("0-5", True),
        ("0-2 3-4", True),
        ("0-3 2-4", True),
        ("0-0 0-4", True),
        ("0-4 4-4", True),
        ("0-1 1-3", True),
        ("0-2 2-1 1-4", True),
    ],
)
def test_spans_cover_the_tokens_one_after_the_other(spans: str, found: bool) -> None:
    """Without a gap, an overlap or an empty span, from the first token to the last."""
    made = call()
    pairs = [tuple(int(end) for end in pair.split("-")) for pair in spans.split()]
    labelled = tuple(_span(start, end, number) for number, (start, end) in enumerate(pairs))
    result = judged("engine.spans", made, _reply(made, spans=labelled), versions=Versions.SPAN)
    assert {"replies with spans": 1} == dict(result.exercised)
    if not found:
        assert () == result.findings
        return
    (finding,) = result.findings
    assert (
        "version spans do not cover the tokens one after the other",
        "spans from 0 to 4, each beginning where the previous one ends, under another version",
        ", ".join(f"{span.version}: {span.start}-{span.end}" for span in labelled),
        {"call": 1, "server": "e0"},
    ) == texts(finding)


@pytest.mark.parametrize(
    ("versions", "found"), [((0, 1, 0), False), ((0, 0, 1), True), ((0, 1, 1), True)]
)
def test_neighbouring_spans_have_other_versions(versions: tuple[int, ...], found: bool) -> None:
    """The first two and the last two alike; a version may come back."""
    made = call()
    spans = tuple(_span(i, i + 1 + (i == 2), version) for i, version in enumerate(versions))
    result = judged("engine.spans", made, _reply(made, spans=spans), versions=Versions.SPAN)
    assert found == bool(result.findings)


def test_spans_without_tokens_and_tokens_without_spans_are_not_judged() -> None:
    """An abort in the queue has neither."""
    made = call()
    for tokens, spans in ((0, (_span(0, 1, 0),)), (4, ())):
        answer = _reply(made, tokens, spans=spans)
        result = judged("engine.spans", made, answer, versions=Versions.SPAN)
        assert ({}, ()) == (dict(result.exercised), result.findings)


def _chunks(*pieces: tuple[int, ...], rows: int = 6) -> list[Chunk]:
    chunks = [Chunk(call_id=1, token_ids=piece) for piece in pieces]
    return [*chunks[:-1], replace(chunks[-1], rows=rows, finished=True)]


_TOKENS = (30, 31, 32, 33)


@pytest.mark.parametrize(
    ("mode", "pieces", "problem"),
    [
        ("delta", ((30,), (31, 32), (33,)), ""),
        ("delta", (_TOKENS,), ""),
        ("delta", ((30,), (31, 32), (32, 33)), "the chunks make 5 tokens: [31, 32, 32, 33]"),
        ("delta", ((30,),), "the chunks make 1 token: [30]"),
        ("delta", ((30, 31), (32, 34)), "the chunks make 4 tokens: [30, 31, 32, 34]"),
        ("cumulative", ((30,), (30, 31, 32), _TOKENS), ""),
        ("cumulative", ((30,), (30,), _TOKENS), ""),
        ("cumulative", ((30,), (31, 32), _TOKENS), "a chunk does not continue the previous one"),
        ("cumulative", ((30, 31), (30,), _TOKENS), "a chunk does not continue the previous one"),
        ("cumulative", ((30,), (30, 31)), "the chunks make 2 tokens: [30, 31]"),
    ],
)
def test_chunks_make_up_the_reply(
    mode: str, pieces: tuple[tuple[int, ...], ...], problem: str
) -> None:
    """Added up, or the last one alone, as declared; the last four tokens are shown."""
    made = call(stream=StreamMode(mode))
    result = judged("engine.stream", made, *_chunks(*pieces), _reply(made))
    assert {f"{mode} streams": 1} == dict(result.exercised)
    if not problem:
        assert () == result.findings
        return
    (finding,) = result.findings
    shown = problem + (" at the end" if "make" in problem else "")
    chunks = len(pieces)
    assert (
        "the chunks of a stream do not make up the reply",
        "4 tokens, [30, 31, 32, 33] at the end, and 6 rows on the last chunk",
        f"{shown} ({mode}, {chunks} chunks, ended by length)",
        {"call": 1, "server": "e0"},
    ) == texts(finding)


def test_the_first_fault_of_a_stream_is_told() -> None:
    """Its tokens, then its ends, then its rows."""
    made = call(stream=StreamMode.DELTA)
    first, last = _chunks((30,), (31, 32, 33))
    wrong_rows = replace(last, rows=5)
    for chunks, words in (
        ((first, replace(last, finished=False, rows=5)), "0 chunks are marked as the last"),
        ((replace(first, rows=1), wrong_rows), "a chunk before the last one has routes"),
        ((first, wrong_rows), "the last chunk has 5 rows"),
        ((replace(first, finished=True), replace(last, finished=False)), "1 chunks are marked"),
        ((first, replace(wrong_rows, token_ids=(31,), finished=False)), "the chunks make 2 tokens"),
    ):
        (finding,) = judged("engine.stream", made, *chunks, _reply(made)).findings
        assert finding.observed.startswith(words)


def test_streams_of_several_calls_are_told_apart() -> None:
    """Chunks of two calls may alternate; a call without chunks, or with the complete reply alone,
    is not judged.
    """
    one, two = (call(number, stream=StreamMode.DELTA) for number in (1, 2))
    pieces = [_chunks((30, 31), (32, 33)), _chunks((30,), (31, 32, 33))]
    second = [replace(chunk, call_id=2) for chunk in pieces[1]]
    mixed = (one, two, pieces[0][0], second[0], second[1], pieces[0][1], _reply(one), _reply(two))
    result = judged("engine.stream", *mixed)
    assert (Verdict.PASS, {"delta streams": 2}) == (result.verdict, dict(result.exercised))
    for mode in (None, StreamMode.FINAL):
        made = call(stream=mode)
        silent = judged("engine.stream", made, *_chunks((30,)), _reply(made))
        assert ({}, ()) == (dict(silent.exercised), silent.findings)
    assert {} == dict(judged("engine.stream", one, _reply(one)).exercised)


@pytest.mark.parametrize(
    ("prompt", "budget", "start", "refusal"),
    [
        (1, 1, 0, None),
        (1, None, 1, None),
        (0, 1, 0, "abort"),
        (0, 0, 0, "abort"),
        (1, 0, 0, "empty"),
        (19, 1, 0, None),
        (20, 1, 0, "error"),
        (19, 2, 0, "ignored"),
        (19, None, 0, None),
        (10, 10, 10, None),
        (10, 11, 10, "ignored"),
        (10, 10, 11, "error"),
    ],
)
def test_which_calls_an_engine_refuses(
    prompt: int, budget: int | None, start: int, refusal: str | None
) -> None:
    """On both sides of each border of an engine with 20 places."""
    terms = engine_contract(
        terms={
            "max_length": 20,
            "empty_prompt": "abort",
            "zero_budget": "empty",
            "excess_budget": "ignored",
            "bad_start": "error",
        }
    ).engine
    assert terms is not None
    made = call(prompt=prompt, max_tokens=budget, routes_start=start)
    assert refusal == refusal_of(terms, made)
    assert (refusal in (None, "ignored")) == is_served(terms, made)


@pytest.mark.parametrize(
    ("check_id", "reason"),
    [
        ("engine.stream", "streams only the complete reply"),
        ("engine.sampling", "declares neither top-p"),
        ("engine.ends", "does not declare what replies show"),
        ("engine.length", "does not declare how much"),
        ("engine.samples", "a call has one sample"),
        ("engine.paused-calls", None),
    ],
)
def test_a_contract_without_terms_of_an_engine_offers_nothing(
    check_id: str, reason: str | None
) -> None:
    """No option is assumed; whether it pauses is not known."""
    contract = replace(engine_contract(), engine=None)
    found = default_registry()[check_id].inapplicable(contract)
    assert (reason is None) == (found is None)
    assert found is None or (reason or "") in found


@pytest.mark.parametrize(("ends", "tokens"), [(9, 3), (8, 1), (2, 0)])
def test_a_reply_without_its_end_token_names_up_to_eight(ends: int, tokens: int) -> None:
    """And shows what is at its end."""
    made = call(end_tokens=tuple(range(50, 50 + ends)))
    answer = _reply(made, tokens, "stop")
    (finding,) = judged("engine.ends", made, answer, terms=_KEPT).findings
    assert f"one of {list(range(50, 50 + min(ends, 8)))} at the end" == finding.expected
    end = f"{29 + tokens} at the end of {tokens} token{'s' * (tokens > 1)}"
    assert (end if tokens else "no tokens") == finding.observed
    assert {"call": 1, "server": "e0", "request": "r1"} == dict(finding.where)


_KEPT = {"end_token": "kept", "end_tokens": (50,)}


@pytest.mark.parametrize(
    ("tokens", "reason", "passed"),
    [((50, 1, 2), "stop", 0), ((1, 50, 50), "length", 1), ((1, 51, 2), "stop", 1)],
)
def test_the_first_token_that_should_have_ended_a_call_is_named(
    tokens: tuple[int, ...], reason: str, passed: int
) -> None:
    """Of several end tokens."""
    made = call(end_tokens=(50, 51))
    values = {"token_ids": tokens, "logprobs": None, "routes": None}
    (finding,) = judged(
        "engine.ends", made, _reply(made, 3, reason, **values), terms=_KEPT
    ).findings
    assert (
        "a call went on after a token that ends it",
        f"an end at token {passed} ({tokens[passed]}), by stop",
        f"3 tokens; it ended by {reason}",
        {"call": 1, "server": "e0", "request": "r1", "index": passed},
    ) == texts(finding)
