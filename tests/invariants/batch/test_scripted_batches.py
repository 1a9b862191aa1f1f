"""Findings about batches: which sample, token and place is named if two are wrong, and what a
border case is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.training import Batch
from rollproof.core.records import BatchRow, FinishReason, IntArray, Rollout
from rollproof.core.trace import Header, Trace
from rollproof.judging.checks import CheckResult, Verdict
from tests.support.padded_batches import Padder, padded_contract
from tests.support.trace_script import check


def _routes(number: int, rows: int) -> IntArray:
    places, layers = np.indices((rows, 3))
    first = (places + 2 * layers + 3 * number) % 7
    return np.stack([first, first + 1], axis=2).astype(np.int32)


def _sample(number: int = 0, **changes: Any) -> Rollout:
    """r0 has 3 + 4 tokens, r1 has 1 + 2, r2 has 2 + 3."""
    prompt, response = ((3, 4), (1, 2), (2, 3))[number]
    tokens = tuple(range(10 * number + 10, 10 * number + 10 + prompt + response))
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "prompt_ids": tokens[:prompt],
        "response_ids": tokens[prompt:],
        "logprobs": -1.0 - number - np.arange(response) / 4,
        "loss_mask": np.ones(response, dtype=np.int64),
        "routes": _routes(number, prompt + response - 1),
        "finish_reason": FinishReason.LENGTH,
    }
    return Rollout(**{**fields, **changes})


def _row(sample: Rollout, mark: bool = False, **changes: Any) -> BatchRow:
    return replace(Padder(mark=mark).row(sample), **changes)


def _judged(
    check_id: str,
    samples: Sequence[Rollout],
    converted: Sequence[BatchRow],
    event: Mapping[str, Any] | None = None,
    **changes: Any,
) -> CheckResult:
    header = Header(subject="scripted", contract=padded_contract(**changes), about="batches")
    batch = Batch(name="b", samples=tuple(samples), rows=tuple(converted), **(event or {}))
    return check(f"batch.{check_id}", Trace(header=header, events=()).with_events([batch]))


def _texts(result: CheckResult) -> tuple[str, str, str, dict[str, Any]]:
    (finding,) = result.findings
    return finding.title, finding.expected, finding.observed, dict(finding.where)


def _changed(array: Any, values: Mapping[int, Any]) -> Any:
    out = array.copy()
    for place, value in values.items():
        out[place] = value
    return out


_BOTH = (_sample(0), _sample(1))


@pytest.mark.parametrize(
    ("check_id", "counters"),
    [
        ("tokens", {"rows compared": 2}),
        ("complete", {"samples converted": 2}),
        ("padding", {"padded places": 26}),
        ("loss-mask", {"tokens compared": 10}),
        ("logprobs", {"logprobs compared": 6}),
        ("routes", {"rows compared": 8}),
        ("expert-ids", {"rows with routes": 2}),
        ("filler", {"places without a capture": 28}),
        ("input", {"batches": 1}),
        ("accepts", {"well-formed batches": 1}),
    ],
)
def test_a_right_batch_passes(check_id: str, counters: dict[str, int]) -> None:
    """What is counted."""
    result = _judged(check_id, _BOTH, [_row(sample) for sample in _BOTH])
    counted = {name: times for name, times in result.exercised.items() if times}
    assert (Verdict.PASS, counters) == (result.verdict, counted)


@pytest.mark.parametrize(("response", "judged"), [(13, True), (14, False)])
def test_a_sample_of_more_than_16_tokens_may_be_refused(response: int, judged: bool) -> None:
    """One of 16 may not."""
    long = _sample(0, response_ids=tuple(range(50, 50 + response)), routes=None)
    result = _judged("accepts", [long], [], {"refused": "ValueError: too long"})
    assert judged == bool(result.exercised)
    if not judged:
        assert () == result.findings
        return
    assert (
        "a well-formed batch was refused",
        "rows for 1 sample of 3+13 tokens",
        "ValueError: too long",
        {"batch": "b"},
    ) == _texts(result)
    assert "a well-formed batch was refused: ValueError" == result.findings[0].kind


@pytest.mark.parametrize(
    ("times", "title"), [(0, "a sample was lost"), (2, "a sample became several rows")]
)
def test_each_sample_becomes_one_row(times: int, title: str) -> None:
    """The one that does not is named, with the rows of the batch."""
    first, second = (_row(sample) for sample in _BOTH)
    result = _judged("complete", _BOTH, [first, *[second] * times])
    assert {"samples converted": 2} == dict(result.exercised)
    ids = ["r0", *["r1"] * times]
    plural = "s" * (times != 1)
    assert (
        title,
        "one row for each of 2 samples",
        f"{times or 'no'} row{plural} for r1; the batch holds {ids}",
        {"batch": "b", "request": "r1"},
    ) == _texts(result)


def test_a_sample_without_response_may_be_dropped_and_not_doubled() -> None:
    """It trains nothing."""
    empty = _sample(0, response_ids=(), logprobs=np.zeros(0), loss_mask=np.zeros(0, int))
    row = _row(_sample(0))
    for times, found in ((0, False), (1, False), (2, True)):
        assert found == bool(_judged("complete", [empty], [row] * times).findings)


def test_rows_of_no_sample_are_named() -> None:
    """Beside all that are of one."""
    extra = [replace(_row(_sample(0)), request_id=name) for name in ("x", "y")]
    rows = [_row(_sample(0)), extra[0], _row(_sample(1)), extra[1]]
    assert (
        "rows of no sample",
        "rows of ['r0', 'r1']",
        "rows of ['x', 'y']",
        {"batch": "b"},
    ) == _texts(_judged("complete", _BOTH, rows))


@pytest.mark.parametrize(
    ("tokens", "attention", "observed", "cut"),
    [
        ({7: 99, 9: 98}, {}, "7 tokens, other ones from number 2 on: [99, 13, 98, 15]", False),
        ({5: 99}, {}, "7 tokens, other ones from number 0 on: [99, 11, 12, 13]", False),
        ({11: 99}, {}, "7 tokens, other ones from number 6 on: [99]", False),
        ({12: 99}, {12: 1}, "8 tokens, other ones from number 7 on: [99]", False),
        ({11: 0}, {11: 0}, "the first 6 of 7 tokens", True),
        (
            dict.fromkeys(range(6, 12), 0),
            dict.fromkeys(range(6, 12), 0),
            "the first 1 of 7 tokens",
            True,
        ),
    ],
)
def test_other_tokens_of_a_row_are_shown(
    tokens: dict[int, int], attention: dict[int, int], observed: str, cut: bool
) -> None:
    """From the first different one on; what was cut has another hint."""
    right = _row(_sample(0))
    wrong = replace(
        right,
        token_ids=_changed(right.token_ids, tokens),
        attention=_changed(right.attention, attention),
    )
    result = _judged("tokens", _BOTH, [wrong, _row(_sample(1))])
    assert {"rows compared": 2} == dict(result.exercised)
    assert (
        "a row holds other tokens than its sample",
        "the 7 tokens of r0 where attention is 1",
        observed,
        {"batch": "b", "request": "r0"},
    ) == _texts(result)
    assert cut == result.findings[0].hint.startswith("The sample was cut")


def test_exchanged_rows_name_the_other_sample() -> None:
    """Each of the two."""
    rows = [
        replace(_row(sample), request_id=name)
        for sample, name in zip(_BOTH, ("r1", "r0"), strict=True)
    ]
    findings = _judged("tokens", _BOTH, rows).findings
    assert [("r0", "the tokens of r1"), ("r1", "the tokens of r0")] == [
        (finding.where["request"], finding.observed) for finding in findings
    ]


@pytest.mark.parametrize("pad", [None, 14])
def test_tokens_that_attention_leaves_out_are_shown(pad: int | None) -> None:
    """With their value, if they all are the padding token."""
    sample = _sample(0, response_ids=(14, 14, 15, 16))
    right = _row(sample)
    wrong = replace(right, attention=_changed(right.attention, {8: 0, 9: 0}))
    result = _judged("tokens", [sample], [wrong], pad_id=pad)
    shown = "[14, 14]" if pad is None else "the padding token 14"
    assert (
        "attention leaves out tokens of the sample",
        "attention 1 at the 7 tokens of r0",
        f"attention 0 at 2 of 7 tokens: {shown}",
        {"batch": "b", "request": "r0", "position": 8},
    ) == _texts(result)
    assert (pad is not None) == result.findings[0].hint.startswith("Make the attention mask")
    one_more = replace(right, attention=_changed(right.attention, {9: 0, 10: 0}))
    (finding,) = _judged("tokens", [sample], [one_more], pad_id=14).findings
    assert finding.observed.endswith("[14, 15]")


@pytest.mark.parametrize("places", [(4,), (0, 12), (17,), (4, 12, 17)])
def test_padding_that_counts_is_counted(places: tuple[int, ...]) -> None:
    """Before the sample and behind it."""
    right = _row(_sample(0))
    wrong = replace(right, loss_mask=_changed(right.loss_mask, dict.fromkeys(places, 1)))
    number = len(places)
    shown = ", ".join(map(str, places))
    assert (
        "padding counts in the loss",
        "loss mask 0 where attention is 0",
        f"loss mask 1 at {number} padded place{'s' * (number > 1)} ({shown})",
        {"batch": "b", "request": "r0", "position": places[0]},
    ) == _texts(_judged("padding", _BOTH, [wrong, _row(_sample(1))]))


@pytest.mark.parametrize(
    ("changes", "title", "words", "position"),
    [
        ({8: 0}, "the loss leaves out trained tokens", "leaves out 1 token (position 3)", 3),
        (
            {8: 0, 11: 0},
            "the loss leaves out trained tokens",
            "leaves out 2 tokens (position 3, 6)",
            3,
        ),
        (
            {7: 1},
            "the loss counts at prompt or environment tokens",
            "counts at 1 token (position 2)",
            2,
        ),
        (
            {5: 1, 7: 1, 9: 0},
            "the loss counts at prompt or environment tokens",
            "counts at 2 tokens (position 0, 2)",
            0,
        ),
    ],
)
def test_the_loss_counts_the_trained_tokens(
    changes: dict[int, int], title: str, words: str, position: int
) -> None:
    """From the first of the response to the last; surplus comes first."""
    right = _row(_sample(0))
    wrong = replace(right, loss_mask=_changed(right.loss_mask, changes))
    result = _judged("loss-mask", _BOTH, [_row(_sample(1)), wrong])
    assert (
        title,
        "loss mask 1 at the 4 trained tokens of r0, 0 elsewhere",
        f"it {words}",
        {"batch": "b", "request": "r0", "position": position},
    ) == _texts(result)


@pytest.mark.parametrize("reason", FinishReason)
@pytest.mark.parametrize("logprobs", ["all", "none", "second"])
def test_tokens_that_may_be_masked(reason: FinishReason, logprobs: str) -> None:
    """Those of an aborted sample, and those without a logprob; none of them may count instead."""
    values = {"all": np.zeros(4), "none": None, "second": np.array([0, np.nan, 0, 0])}[logprobs]
    sample = _sample(0, finish_reason=reason, logprobs=values)
    right = _row(sample)
    aborted = reason in (FinishReason.ABORT, FinishReason.ERROR)
    for place, excused in ((8, logprobs == "none"), (9, logprobs != "all")):
        wrong = replace(right, loss_mask=_changed(right.loss_mask, {place: 0}))
        result = _judged("loss-mask", [sample], [wrong])
        assert (excused or aborted) == (not result.findings)
    surplus = replace(right, loss_mask=_changed(right.loss_mask, {6: 1}))
    assert 1 == _judged("loss-mask", [sample], [surplus]).found


@pytest.mark.parametrize("field", ["loss-mask", "logprobs"])
@pytest.mark.parametrize("length", [17, 19])
def test_a_field_of_another_length_than_its_row_is_a_finding(field: str, length: int) -> None:
    """One place less or more."""
    name = field.replace("-", "_")
    wrong = _row(_sample(0), **{name: np.resize(getattr(_row(_sample(0)), name), length)})
    result = _judged(field, _BOTH, [wrong, _row(_sample(1))])
    assert (
        f"a {name} of another length than its row",
        "18 places",
        str(length),
        {"batch": "b", "request": "r0"},
    ) == _texts(result)
    if field == "loss-mask":
        padding = _judged("padding", [_sample(0)], [wrong])
        assert "no row has a loss mask of its length" in padding.reason


def _logprobs(values: dict[int, float], sample: Rollout | None = None) -> CheckResult:
    made = sample if sample is not None else _sample(0)
    right = _row(made)
    wrong = replace(right, logprobs=_changed(right.logprobs, values))
    return _judged("logprobs", [_sample(1), made], [_row(_sample(1)), wrong])


@pytest.mark.parametrize(
    ("values", "title", "words", "hint"),
    [
        ({8: -7.0, 10: -8.0}, "logprobs are not at their tokens", "-7.000000; so at 2", "Carry"),
        (
            {9: -1.0, 10: -1.25, 11: -1.5},
            "logprobs are not at their tokens",
            "-1.000000, which is that of token 3; so at 3",
            "Pad logprobs",
        ),
        ({9: -1.253}, "logprobs are rounded", "-1.253000, rounded; so at 1", "Keep float32"),
        (
            {9: -1.253, 11: -9.0},
            "logprobs are not at their tokens",
            "-1.253000, rounded; so at 2",
            "Keep float32",
        ),
    ],
)
def test_the_first_wrong_logprob_is_shown(
    values: dict[int, float], title: str, words: str, hint: str
) -> None:
    """With where it comes from."""
    result = _logprobs(values)
    assert {"logprobs compared": 6} == dict(result.exercised)
    place = min(values)
    assert (
        title,
        f"{-1.0 - (place - 8) / 4:.6f} at position {place - 5}",
        f"{words} token{'s' * (len(values) > 1)} of 4",
        {"batch": "b", "request": "r0", "position": place - 5},
    ) == _texts(result)
    assert result.findings[0].hint.startswith(hint)


def test_a_missing_logprob_is_no_number() -> None:
    """Unless it is masked; those that are there are compared with or without it."""
    sample = _sample(0, logprobs=np.array([np.nan, -1.0, np.nan, -2.0]))
    assert () == _logprobs({}, sample).findings
    result = _logprobs({8: 0.0, 10: 0.5, 11: -9.0}, sample)
    assert (
        "a missing logprob became a number",
        "NaN, or loss mask 0 at position 3",
        "0.000000; so at 2 tokens of 4",
        {"batch": "b", "request": "r0", "position": 3},
    ) == _texts(result)
    right = _row(sample)
    masked = replace(
        right,
        logprobs=_changed(right.logprobs, {8: 0.0, 10: 0.0}),
        loss_mask=_changed(right.loss_mask, {8: 0, 10: 0}),
    )
    assert () == _judged("logprobs", [sample], [masked]).findings
    bare = replace(masked, loss_mask=None)
    assert 1 == _judged("logprobs", [sample], [bare]).found


def test_the_first_token_with_a_moved_logprob_is_named() -> None:
    """Two tokens have the value."""
    sample = _sample(0, logprobs=np.array([-1.0, -1.5, -1.0, -2.0]))
    (finding,) = _logprobs({11: -1.0}, sample).findings
    assert finding.observed.startswith("-1.000000, which is that of token 3; so at 1")


@pytest.mark.parametrize(
    ("check_id", "silent", "wrong"),
    [
        ("padding", {"loss_mask": None}, {"loss_mask": np.ones(18, dtype=np.int64)}),
        ("loss-mask", {"loss_mask": None}, {"loss_mask": np.zeros(18, dtype=np.int64)}),
        ("loss-mask", {"loss_mask": np.ones(17)}, {"loss_mask": np.zeros(18, dtype=np.int64)}),
        ("logprobs", {"logprobs": None}, {"logprobs": np.full(18, -9.0)}),
        ("logprobs", {"logprobs": np.zeros(17)}, {"logprobs": np.full(18, -9.0)}),
        ("routes", {"routes": None}, {"routes": np.zeros((18, 3, 2), dtype=np.int32)}),
        ("routes", {"routes": np.zeros((18, 2, 2))}, {"routes": np.zeros((18, 3, 2))}),
        ("tokens", {"token_ids": np.zeros(18)}, {"token_ids": np.full(18, 7)}),
    ],
)
def test_a_row_behind_one_that_lacks_a_field_is_judged(
    check_id: str, silent: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """Each sample for itself."""
    rows = [_row(_sample(0), **silent), _row(_sample(1), **wrong)]
    findings = _judged(check_id, _BOTH, rows).findings
    assert "r1" == findings[-1].where["request"]


@pytest.mark.parametrize("check_id", ["logprobs", "routes"])
def test_a_row_behind_a_sample_that_has_nothing_to_lose_is_judged(check_id: str) -> None:
    """Without logprobs or routes of its own."""
    samples = [_sample(0, logprobs=None, routes=None), _sample(1)]
    lost = _row(samples[1], logprobs=None, routes=np.zeros((18, 3, 2), dtype=np.int32))
    findings = _judged(check_id, samples, [_row(samples[0]), lost]).findings
    assert ["r1"] == [finding.where["request"] for finding in findings]
    empty = _sample(
        0, response_ids=(), logprobs=np.zeros(0), loss_mask=np.zeros(0, int), routes=None
    )
    findings = _judged("logprobs", [empty, samples[1]], [_row(empty), lost]).findings
    assert ["r1"] == [finding.where["request"] for finding in findings]


def test_a_single_token_that_attention_leaves_out_is_shown() -> None:
    """And of tokens that the row holds twice the first place."""
    single = _sample(
        0, prompt_ids=(11,), response_ids=(), logprobs=None, loss_mask=None, routes=None
    )
    row = _row(single)
    (finding,) = _judged(
        "tokens", [single], [replace(row, attention=np.zeros_like(row.attention))]
    ).findings
    assert ("attention leaves out tokens of the sample", 7) == (
        finding.title,
        finding.where["position"],
    )
    right = _row(_sample(1))
    twice = replace(
        right,
        token_ids=_changed(right.token_ids, {12: 20, 13: 21, 14: 22}),
        attention=_changed(right.attention, {8: 0}),
    )
    (finding,) = _judged("tokens", [_sample(1)], [twice]).findings
    assert ("attention leaves out tokens of the sample", 8) == (
        finding.title,
        finding.where["position"],
    )


def _with_routes(row: BatchRow, cells: Mapping[int, Any]) -> BatchRow:
    return replace(row, routes=_changed(row.routes, cells))


def test_wrong_rows_are_counted_and_the_first_is_shown() -> None:
    """By its token; its experts are those of the first layer."""
    wrong = _with_routes(_row(_sample(0)), {6: [[0, 7]] * 3, 9: [[0, 7]] * 3})
    result = _judged("routes", _BOTH, [wrong, _row(_sample(1))])
    assert {"rows compared": 8} == dict(result.exercised)
    shown = _routes(0, 6)[1, 0].tolist()
    assert (
        "route rows are not at their tokens",
        "the row of token 1 at place 6, where the token is",
        f"experts [0, 7] at place 6 instead of {shown}; so for 2 of 6 captured rows (token 1, 4)",
        {"batch": "b", "request": "r0", "position": 1},
    ) == _texts(result)


@pytest.mark.parametrize(("away", "words"), [(1, "1 place away"), (3, "3 places away")])
def test_a_row_that_is_elsewhere_is_found_there(away: int, words: str) -> None:
    """Shifted by one or more."""
    right = _row(_sample(0))
    moved = _with_routes(right, {5: [[0, 7]] * 3, 12 + away: right.routes[5]})
    (finding,) = _judged("routes", [_sample(0)], [moved]).findings
    assert f"; token 0's row is at place {12 + away}, {7 + away} places away; so for" in (
        finding.observed
    )
    assert words == f"{away} place{'s' * (away > 1)} away"
    shifted = replace(right, routes=np.roll(right.routes, away, axis=0))
    (finding,) = _judged("routes", [_sample(0)], [shifted]).findings
    assert f"; token 0's row is at place {5 + away}, {words}; so for 6 of 6" in finding.observed


def test_a_row_of_another_sample_names_it() -> None:
    """And its token; a sample without routes has none."""
    silent = _sample(2, routes=None)
    samples = [_sample(0), silent, _sample(1)]
    wrong = _with_routes(_row(_sample(0)), {7: _routes(1, 2)[1]})
    (finding,) = _judged("routes", samples, [wrong, _row(_sample(1))]).findings
    assert finding.observed.startswith("the row at place 7 is that of token 1 of r1; so for 1 of 6")


def test_rows_that_the_batch_lacks_are_wrong() -> None:
    """The batch ends before them."""
    right = _row(_sample(0))
    short = replace(right, routes=right.routes[:9])
    (finding,) = _judged("routes", [_sample(0)], [short]).findings
    words = "no row at place 9: the batch has 9; so for 2 of 6 captured rows (token 4-5)"
    assert words == finding.observed
    assert (
        () == _judged("routes", [_sample(0)], [replace(right, routes=right.routes[:11])]).findings
    )


def test_samples_without_routes_leave_those_of_others() -> None:
    """The samples that lost theirs are named; a sample without routes gets none."""
    samples = [_sample(0), _sample(1), _sample(2, routes=None)]
    rows = [_row(sample) for sample in samples]
    right = _judged("mixed", samples, rows)
    assert (Verdict.PASS, {"mixed batches": 1}) == (right.verdict, dict(right.exercised))
    lost = [rows[0], replace(rows[1], routes=None), rows[2]]
    assert (
        "one sample without routes cost others theirs",
        "routes for every sample that has them, or an error",
        "no routes for r1",
        {"batch": "b"},
    ) == _texts(_judged("mixed", samples, lost))
    blank = [replace(row, routes=np.full_like(row.routes, -1)) for row in rows]
    (finding,) = _judged("mixed", samples, blank).findings
    assert "no routes for r0, r1" == finding.observed
    given = _with_routes(rows[2], {6: [[1, 2]] * 3, 8: [[3, 4]] * 3, 10: [[5, 6]] * 3})
    (finding,) = _judged("mixed", samples, [*rows[:2], given]).findings
    assert (
        "a sample without routes was given some",
        "experts [1, 2] for 2 tokens that no router chose",
        "r2",
    ) == (finding.title, finding.observed, finding.where["request"])


def test_many_samples_that_lost_their_routes_are_named_up_to_six() -> None:
    """Of eight samples seven have routes."""
    base = _sample(0)
    samples = [
        replace(base, request_id=f"s{i}", routes=base.routes if i else None) for i in range(8)
    ]
    rows = [_row(sample) for sample in samples]
    lost = [rows[0], *(replace(row, routes=None) for row in rows[1:])]
    (finding,) = _judged("mixed", samples, lost).findings
    assert "no routes for s1, s2, s3, s4, s5, s6" == finding.observed


@pytest.mark.parametrize(
    ("cells", "marked", "observed"),
    [
        ({0: [[1, 2]] * 3, 15: [[1, 2]] * 3}, (), "experts [1, 2] at 2 places (0, 15)"),
        ({11: [[1, 2]] * 3}, (), "experts [1, 2] at 1 place (11)"),
        ({4: 0}, (), "zeros at 1 place (4)"),
        ({0: [[0, 1]] * 3}, (), "arange at 1 place (0)"),
        ({0: [[1, 2]] * 3, 15: [[1, 2]] * 3}, (15,), "experts [1, 2] at 1 place (0)"),
        ({0: [[1, 2]] * 3}, (0,), None),
    ],
)
def test_places_without_a_capture_hold_filler(
    cells: dict[int, Any], marked: tuple[int, ...], observed: str | None
) -> None:
    """Or are marked; the first is shown."""
    routed = np.array([0 if place in marked else 1 for place in range(18)]) if marked else None
    wrong = replace(_with_routes(_row(_sample(0)), cells), routed=routed)
    result = _judged("filler", [_sample(0)], [wrong])
    if observed is None:
        assert () == result.findings
        return
    place = min(set(cells) - set(marked))
    assert (
        "a place without a capture is not the declared filler",
        "minus-one filler, or rows marked as no capture",
        observed,
        {"batch": "b", "request": "r0", "position": place},
    ) == _texts(result)


def test_a_batch_without_padding_has_no_place_for_filler() -> None:
    """A row behind it is judged."""
    right = _row(_sample(0))
    fields = ("token_ids", "attention", "loss_mask", "logprobs")
    tight = replace(
        right,
        **{name: getattr(right, name)[5:12] for name in fields},
        routes=right.routes[5:11],
    )
    wrong = _with_routes(_row(_sample(1)), {0: [[1, 2]] * 3})
    result = _judged("filler", _BOTH, [tight, wrong])
    assert 1 == result.exercised["batches without such places"]
    assert ["r1"] == [finding.where["request"] for finding in result.findings]


@pytest.mark.parametrize(("final", "found"), [("arange", False), ("zeros", True)])
def test_the_final_token_has_a_filler_of_its_own(final: str, found: bool) -> None:
    """With one row for each token."""
    routes = _routes(0, 7)
    routes[6] = [[0, 1]] * 3
    sample = _sample(0, routes=routes)
    result = _judged("filler", [sample], [_row(sample)], rows="T", final_row=final)
    assert found == bool(result.findings)


def test_only_mixed_batches_of_well_formed_samples_are_mixed() -> None:
    """batch.refuses judges a malformed one, and routes for all or for none are not mixed."""
    samples = [_sample(0), _sample(1, routes=None)]
    rows = [_row(samples[0]), _row(samples[1])]
    malformed = {"defect": "wrong", "defective": "r0"}
    assert {} == dict(_judged("mixed", samples, rows, malformed).exercised)
    assert {} == dict(_judged("mixed", _BOTH, [_row(sample) for sample in _BOTH]).exercised)
    none = [replace(row, routes=None) for row in rows]
    assert {} == dict(_judged("mixed", samples, none).exercised)
    refused = {"refused": "ValueError"}
    silent = _judged("mixed", samples, rows, refused)
    assert {"mixed batches refused": 1} == dict(silent.exercised)


def _malformed(sample: Rollout, row: BatchRow | None) -> CheckResult:
    event = {"defect": "wrong", "defective": sample.request_id}
    rows = [_row(_sample(1)), *([] if row is None else [row])]
    return _judged("refuses", [_sample(1), sample], rows, event)


def _defective(*, field: str = "routes", by: int = 1) -> tuple[Rollout, BatchRow]:
    """A sample with a field of another length, and the row of the right one."""
    right = _sample(0)
    value = getattr(right, field)
    longer = np.concatenate([value, value[:by] + (1 if field == "routes" else 0)])
    wrong = longer if by > 0 else value[:by]
    return replace(right, **{field: wrong}), _row(right)


@pytest.mark.parametrize(
    ("places", "spilled", "observed"),
    [
        ((), False, "8 rows were cut to the tokens"),
        ((12,), True, "of 8 rows those beyond the tokens stand behind the sample"),
        ((13,), False, "8 rows were cut to the tokens"),
    ],
)
def test_surplus_routes_are_cut_or_spilled(
    places: tuple[int, ...], spilled: bool, observed: str
) -> None:
    """Spilled if the next place holds the next row."""
    sample, row = _defective(by=2)
    assert sample.routes is not None
    made = _with_routes(row, dict.fromkeys(places, sample.routes[7]))
    result = _malformed(sample, made)
    assert {"malformed samples": 1} == dict(result.exercised)
    assert (
        "wrong: accepted",
        "an error that names the sample and both lengths",
        observed,
        {"batch": "b", "request": "r0"},
    ) == _texts(result)
    assert spilled == ("behind" in observed)


def test_a_row_without_tokens_or_routes_spills_nothing() -> None:
    """The first place is that of no token then."""
    sample, row = _defective(by=2)
    assert sample.routes is not None
    assert () == _malformed(sample, replace(row, routes=None)).findings
    empty = replace(row, attention=np.zeros_like(row.attention))
    for place, words in ((0, "stand behind"), (1, "were cut")):
        made = _with_routes(empty, {place: sample.routes[7]})
        assert words in _malformed(sample, made).findings[0].observed


@pytest.mark.parametrize(
    ("field", "by", "changes", "observed"),
    [
        ("logprobs", 2, {}, "6 were cut to 4 tokens"),
        ("logprobs", -1, {11: -7.5}, "-7.5 is the value of 1 logprob that no engine returned"),
        (
            *("logprobs", -2, {10: -6.5, 11: -7.5}),
            "-6.5 is the value of 2 logprobs that no engine returned",
        ),
        ("logprobs", -2, {10: np.nan, 11: np.nan}, None),
        ("loss_mask", -1, {}, "the mask of 3 was used for 4 tokens"),
        ("loss_mask", 1, {}, "5 were cut to 4 tokens"),
    ],
)
def test_fields_of_another_length_are_shown(
    field: str, by: int, changes: dict[int, float], observed: str | None
) -> None:
    """With what became of them; a value that does not count, or NaN, trains nothing."""
    sample, row = _defective(field=field, by=by)
    made = replace(row, **{field: _changed(getattr(row, field), changes)})
    result = _malformed(sample, made)
    assert [observed] * (observed is not None) == [f.observed for f in result.findings]
    assert () == _malformed(sample, replace(row, **{field: None})).findings
    other = _malformed(sample, replace(row, **{field: getattr(row, field)[:-1]}))
    length = len(getattr(sample, field))
    assert [f"{length} were put into the batch with 4 tokens"] == [
        f.observed for f in other.findings
    ]
    if field == "logprobs" and changes:
        masked = replace(made, loss_mask=_changed(row.loss_mask, {10: 0, 11: 0}))
        assert () == _malformed(sample, masked).findings
        for mask in (None, row.loss_mask[:-1]):
            again = _malformed(sample, replace(made, loss_mask=mask))
            assert result.found == again.found


def test_a_malformed_sample_that_is_gone_was_refused() -> None:
    """Or the batch."""
    sample, row = _defective(by=2)
    assert {"malformed samples refused": 1} == dict(_malformed(sample, None).exercised)
    event = {"defect": "wrong", "defective": "r0", "refused": "ValueError"}
    result = _judged("refuses", [sample], [row], event)
    assert ({"malformed samples refused": 1}, ()) == (dict(result.exercised), result.findings)


def test_what_the_conversion_changed_is_named_up_to_six() -> None:
    """Names of fields."""
    names = tuple(f"f{i}" for i in range(8))
    result = _judged("input", [_sample(0)], [_row(_sample(0))], {"changed": names})
    assert (
        "the conversion wrote into the samples",
        "arrays as they were passed in",
        "changed: f0, f1, f2, f3, f4, f5",
        {"batch": "b"},
    ) == _texts(result)


@pytest.mark.parametrize(
    ("cells", "length", "observed"),
    [
        ({6: [[0, 1]] * 3, 7: [[6, 7]] * 3}, 18, "experts [0, 1] for 2 tokens"),
        ({6: [[7, 8]] * 3, 7: [[-1, 0]] * 3}, 18, None),
        ({6: 0, 7: 0}, 18, "expert 0, 2 times, for 2 tokens"),
        ({6: [[1, 2]] * 3, 7: [[1, 2]] * 3}, 7, "experts [1, 2] for 1 token"),
        ({10: [[1, 2]] * 3}, 18, None),
    ],
)
def test_only_ids_of_experts_are_replayed(
    cells: dict[int, Any], length: int, observed: str | None
) -> None:
    """From 0 to the last one, at the places that the batch has; not at the final token."""
    samples = [_sample(0), _sample(2, routes=None)]
    given = _with_routes(_row(samples[1]), cells)
    given = replace(given, routes=given.routes[:length])
    findings = _judged("mixed", samples, [_row(samples[0]), given]).findings
    words = [] if observed is None else [f"{observed} that no router chose"]
    assert words == [finding.observed for finding in findings]


def test_a_malformed_sample_may_have_a_row_for_every_token() -> None:
    """Its routes are not the field that is too long."""
    sample, row = _defective(field="loss_mask", by=1)
    full = replace(sample, routes=_routes(0, 7))
    assert ["5 were cut to 4 tokens"] == [f.observed for f in _malformed(full, row).findings]


@pytest.mark.parametrize(
    ("rows", "length", "compared"), [("T-1", 6, 6), ("T-1", 7, 7), ("T", 6, 6), ("T", 7, 6)]
)
def test_captured_rows_are_all_but_the_filler_of_the_final_token(
    rows: str, length: int, compared: int
) -> None:
    """Which is there if the contract declares a row for each token, and there is one."""
    sample = _sample(0, routes=_routes(0, length))
    final = {"final_row": "zeros"} if rows == "T" else {}
    result = _judged("routes", [sample], [_row(sample)], **{"rows": rows, **final})
    assert {"rows compared": compared} == dict(result.exercised)


def test_a_row_without_a_token_has_padding_alone() -> None:
    """Of a sample without any, or with tokens that are lost."""
    none: dict[str, Any] = {"logprobs": None, "loss_mask": None, "routes": None}
    empty = _sample(0, prompt_ids=(), response_ids=(), **none)
    row = replace(_row(empty), loss_mask=np.zeros(18, dtype=np.int64))
    result = _judged("padding", [empty], [row])
    assert ({"padded places": 18}, ()) == (dict(result.exercised), result.findings)
    lost = replace(row, attention=np.zeros(18, dtype=np.int64))
    (finding,) = _judged("tokens", [_sample(0)], [lost]).findings
    assert "the first 0 of 7 tokens" == finding.observed
    assert finding.hint.startswith("Padding side, attention mask")


def test_up_to_six_tokens_that_attention_leaves_out_are_shown() -> None:
    """Of seven."""
    row = _row(_sample(0))
    (finding,) = _judged(
        "tokens", [_sample(0)], [replace(row, attention=np.zeros(18, dtype=np.int64))]
    ).findings
    assert "attention 0 at 7 of 7 tokens: [10, 11, 12, 13, 14, 15]" == finding.observed


def test_logprobs_are_compared_by_the_samples_mask_if_the_rows_fits_nothing() -> None:
    """A mask of another length is batch.loss-mask's to report."""
    sample = _sample(0, loss_mask=np.array([1, 0, 1, 1]))
    right = _row(sample)
    wrong = replace(right, logprobs=_changed(right.logprobs, {9: -9.0, 10: -9.0}))
    for mask, compared in ((right.loss_mask, 3), (right.loss_mask[:-1], 3), (None, 3)):
        result = _judged("logprobs", [sample], [replace(wrong, loss_mask=mask)])
        assert {"logprobs compared": compared} == dict(result.exercised)
        assert [5] == [finding.where["position"] for finding in result.findings]
