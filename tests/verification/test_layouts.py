"""Layout functions under judgement: correct ones pass under every convention, faults are told in
words, misuse gets one clear error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollproof
from rollproof.core.contract import Provenance, Rows
from rollproof.core.records import IntArray
from rollproof.errors import SubjectError, UsageError
from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.invariants import default_registry
from rollproof.invariants.layout.call_check import functions_read
from rollproof.judging.checks import CheckResult, Finding, Verdict
from rollproof.judging.report import Report
from rollproof.layouts import Alignment, Context, Fill, Layout, Mesh, Order, Rank, Side
from rollproof.layouts.functions import FUNCTIONS, layout_function
from rollproof.layouts.layout_cases import layout_calls
from rollproof.store import dump_trace, load_trace
from rollproof.verification.layouts import judge_layouts, record_layouts
from rollproof.verification.traces import judge

PLAIN = MegatronLike.layout


def _failing(report: Report) -> set[str]:
    assert [] == [r.reason for r in report.results if "crashed" in r.reason]
    return {result.id for result in report.failed}


def _first(factory: Any, check_id: str, functions: str = "") -> Finding:
    calls = [
        (name, call) for name in functions.split() for call in layout_calls(name, PLAIN, draws=0)
    ] or None
    return next(
        result
        for result in judge_layouts(factory, name="faulty", calls=calls).results
        if result.id == check_id
    ).findings[0]


def test_the_reference_passes_every_check_and_exercises_it() -> None:
    """All checks of layouts pass on the reference; none is idle or ruled out, and the canary is
    seen.
    """
    report = judge_layouts(MegatronLike)
    assert {result.id: Verdict.PASS for result in report.results} == {
        result.id: result.verdict for result in report.results
    }
    assert report.canary is not None and report.canary.red


@pytest.mark.parametrize(
    ("changes", "functions"),
    [
        (
            {"context": Context.CONTIGUOUS, "alignment": Alignment(by=("tp", "cp"))},
            "pack context context_merge targets merge",
        ),
        ({"context": Context.EACH_CONTIGUOUS}, "context context_merge targets merge"),
        ({"layer_axis": "moe"}, "select targets merge reorder gather_stages"),
        ({"fill": Fill.SPREAD, "final": Fill.SPREAD}, "complete fill pack context targets ulysses"),
        (
            {"fill": Fill.SENTINEL, "final": Fill.SENTINEL},
            "complete fill pack context targets ulysses",
        ),
        ({"held": Rows.ALL}, "complete pair targets"),
        ({"held": Rows.CAPTURED_PREFIX}, "complete pair targets"),
        ({"packed": False, "side": Side.LEFT}, "pad unpad"),
        ({"packed": False, "side": Side.BOTH}, "pad unpad"),
        ({"order": Order.BATCH_MAJOR}, "flatten"),
        ({"provenance": Provenance.LATEST_PREFILL}, "join"),
        ({"mesh": Mesh()}, "context targets merge"),
        (
            {"alignment": Alignment(by=("tp", "2cp"), constant=16, total=128, total_scales=True)},
            "pack unpack context context_merge",
        ),
        ({"num_experts": 300, "top_k": 8}, "complete fill select targets compact"),
        ({"num_experts": 8}, "complete fill context select targets compact"),
        ({"num_experts": 32, "top_k": 1}, "complete fill context select targets"),
        ({"group": 3}, "serve reorder"),
    ],
    ids=str,
)
def test_correct_functions_pass_under_every_convention(
    changes: dict[str, Any], functions: str
) -> None:
    """Conventions that differ legitimately are declared, and then nothing is blamed."""

    class Other(MegatronLike):
        layout = replace(PLAIN, **changes)

    calls = [
        (name, call)
        for name in functions.split()
        for call in layout_calls(name, Other.layout, draws=20)
    ]
    report = judge_layouts(Other, calls=calls)
    assert set() == _failing(report)
    assert {"layout.accepts", "layout.returns"} <= {
        r.id for r in report.results if r.verdict is Verdict.PASS
    }


class _Contiguous(MegatronLike):
    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return super().context(replace(layout, context=Context.CONTIGUOUS), samples, rank)


class _OtherRank(MegatronLike):
    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return super().context(layout, samples, replace(rank, cp=(rank.cp + 1) % layout.mesh.cp))


class _Left(MegatronLike):
    def pad(self, layout: Layout, samples: Sequence[IntArray], prompts: Sequence[int]) -> Any:
        return super().pad(replace(layout, side=Side.LEFT), samples, prompts)


class _ByDataSize(MegatronLike):
    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Any:
        return super().pack(replace(layout, alignment=Alignment(constant=layout.mesh.dp)), samples)[
            0
        ]


class _Shift(MegatronLike):
    def pair(self, layout: Layout, tokens: IntArray, routes: IntArray) -> Any:
        return tokens, np.roll(super().pair(layout, tokens, routes)[1], -1, axis=0)


@pytest.mark.parametrize(
    ("factory", "check_id", "functions", "words"),
    [
        (
            _Contiguous,
            "layout.context",
            "context",
            "this is the contiguous division, where zigzag is declared",
        ),
        (_OtherRank, "layout.context", "context", "what rank 1 should hold"),
        (
            _Left,
            "layout.padding",
            "pad",
            "this is padding on the left, where padding on the right is declared",
        ),
        (_ByDataSize, "layout.alignment", "pack", "as multiples of dp = 5 give"),
        (_Shift, "layout.no-shift", "pair", "this is the shift of labels, applied to routes"),
    ],
)
def test_a_finding_says_what_stands_where_and_what_was_done(
    factory: Any, check_id: str, functions: str, words: str
) -> None:
    """Rows are decoded, and the layout that was taken for the declared one is named."""
    findings = [
        finding
        for result in judge_layouts(
            factory,
            calls=[
                (name, call)
                for name in functions.split()
                for call in layout_calls(name, PLAIN, draws=0)
            ],
        ).results
        if result.id == check_id
        for finding in result.findings
    ]
    assert any(words in finding.observed for finding in findings), [
        finding.observed for finding in findings
    ]
    assert all({"function"} <= set(finding.where) for finding in findings)


class _Raises(MegatronLike):
    def flatten(self, layout: Layout, batch: IntArray) -> IntArray:
        raise IndexError("index 7 is out of bounds\nfor axis 0")


class _Exits(MegatronLike):
    def flatten(self, layout: Layout, batch: IntArray) -> IntArray:
        raise SystemExit(3)


class _NoArray(MegatronLike):
    def flatten(self, layout: Layout, batch: IntArray) -> Any:
        return {"rows": batch}


class _Floats(MegatronLike):
    def flatten(self, layout: Layout, batch: IntArray) -> Any:
        return super().flatten(layout, batch) * 0.5


class _Narrow(MegatronLike):
    def flatten(self, layout: Layout, batch: IntArray) -> Any:
        return super().flatten(layout, batch)[..., :1, :]


class _Short(MegatronLike):
    def flatten(self, layout: Layout, batch: IntArray) -> Any:
        return super().flatten(layout, batch)[:-1]


class _Async(MegatronLike):
    async def flatten(self, layout: Layout, batch: IntArray) -> Any:  # type: ignore[override]
        return super().flatten(layout, batch)


class _Ragged(MegatronLike):
    def select(self, layout: Layout, rows: IntArray, rank: Rank, chunk: int) -> Any:
        return [rows[:, self.column(layout, layer)] for layer in self.routed(layout, rank, chunk)]


@pytest.mark.parametrize(
    ("factory", "functions", "check_id", "observed"),
    [
        (_Raises, "flatten", "layout.accepts", "IndexError: index 7 is out of bounds for axis 0"),
        (_Exits, "flatten", "layout.accepts", "SystemExit: 3"),
        (
            _NoArray,
            "flatten",
            "layout.returns",
            "a dict for rows, which is no array|an array of object",
        ),
        (
            _Floats,
            "flatten",
            "layout.returns",
            "an array of float64 (4, 2, 2) for rows: expected whole numbers",
        ),
        (_Narrow, "flatten", "layout.flatten-order", "(4, 1, 2)"),
        (_Short, "flatten", "layout.flatten-order", "(3, 2, 2)"),
        (
            _Async,
            "flatten",
            "layout.returns",
            "a coroutine: layout functions are called as they are",
        ),
        (
            _Ragged,
            "select",
            "layout.returns",
            "a list: expected a mapping from layers to rows",
        ),
    ],
)
def test_a_function_that_raises_or_returns_something_else_is_a_finding(
    factory: Any, functions: str, check_id: str, observed: str
) -> None:
    """Exceptions, exits, other types, other shapes: told by the check that it concerns, never a
    traceback.
    """
    finding = _first(factory, check_id, functions)
    assert any(part in finding.observed for part in observed.split("|")), finding.observed


def test_only_the_functions_that_a_subject_has_are_judged() -> None:
    """A single function is a subject; the checks of the others are not applicable, and say why."""

    def slice_rows(layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return MegatronLike().context(layout, samples, rank)

    report = judge_layouts(layout_function("context", slice_rows, PLAIN), name="slice_rows")
    verdicts = {result.id: result.verdict for result in report.results}
    judged = {
        "layout.context",
        "layout.alignment",
        "layout.padding-rows",
        "layout.accepts",
        "layout.returns",
        "layout.input",
    }
    assert judged == {check_id for check_id, verdict in verdicts.items() if verdict is Verdict.PASS}
    assert {Verdict.PASS, Verdict.NOT_APPLICABLE} == set(verdicts.values())
    reasons = {result.id: result.reason for result in report.results}
    assert (
        "the subject has no function pack or unpack that takes such a case"
        == reasons["layout.packing"]
    )


def test_rows_without_their_versions_are_judged() -> None:
    """A subject need not say which weights computed a row; where it does, it must be right."""

    class RowsAlone(MegatronLike):
        def join(self, layout: Layout, segments: Any) -> Any:
            return super().join(layout, segments)[0]

    class OtherVersions(MegatronLike):
        def join(self, layout: Layout, segments: Any) -> Any:
            rows, versions = super().join(layout, segments)
            return rows, [7 for _ in versions]

    calls = [("join", call) for call in layout_calls("join", PLAIN, draws=0)]
    (report,) = (
        result
        for result in judge_layouts(RowsAlone, name="rows", calls=calls).results
        if result.id == "layout.segments"
    )
    assert Verdict.PASS == report.verdict
    assert (
        "the versions of rows are wrong" == _first(OtherVersions, "layout.segments", "join").title
    )


def test_the_functions_that_checks_read_are_known() -> None:
    """So that only those are called; a check that names none reads all of them."""
    registry = default_registry()
    assert frozenset({"join"}) == functions_read([registry["layout.segments"]])
    both = [registry["layout.segments"], registry["layout.packing"]]
    assert frozenset({"join", "pack", "unpack"}) == functions_read(both)
    assert functions_read([*both, registry["layout.returns"]]) is None


def test_what_a_subject_does_not_support_is_left_out() -> None:
    """``supports`` gives the reason per function and layout."""

    class NoChunks(MegatronLike):
        def supports(self, function: str, layout: Layout) -> str | None:
            return "no virtual stages" if layout.mesh.vpp > 1 else None

    result = judge_layouts(NoChunks, only=["layout.virtual-stages"]).results[0]
    assert (Verdict.NOT_APPLICABLE, "the subject supports no virtual stages") == (
        result.verdict,
        result.reason,
    )


class _NoLayout:
    def flatten(self, layout: Layout, batch: IntArray) -> IntArray:
        return batch


class _NoFunctions:
    layout = PLAIN


class _Unmade(MegatronLike):
    def __init__(self) -> None:
        raise RuntimeError("no GPU")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (_NoLayout, "without a `layout`"),
        (_NoFunctions, r"with none of the layout functions \['complete'"),
        (_Unmade, "could not be created: RuntimeError: no GPU"),
    ],
)
def test_an_unusable_subject_gets_one_clear_error(factory: Any, message: str) -> None:
    """What the adapter lacks is told before anything runs."""
    with pytest.raises(SubjectError, match=message):
        judge_layouts(factory)


def test_names_that_do_not_exist_are_refused() -> None:
    """Profiles, checks and functions are listed where one is not known."""
    with pytest.raises(UsageError, match=r"choose one of \['pr', 'nightly', 'soak'\]"):
        judge_layouts(MegatronLike, profile="quick")
    with pytest.raises(UsageError, match=r"Did you mean layout\.context"):
        judge_layouts(MegatronLike, only=["layout.contex"])
    with pytest.raises(
        UsageError, match=r"No layout function is named 'slice'; choose one of \['complete'"
    ):
        layout_function("slice", lambda **_: None, PLAIN)


def test_a_trace_about_layouts_is_stored_and_judged_again(tmp_path: Path) -> None:
    """Written as JSON and read back, it has the same findings; other checks do not judge it."""
    calls = [("context", call) for call in layout_calls("context", PLAIN, draws=2)]
    trace = record_layouts(_Contiguous, calls=calls)
    dump_trace(trace, tmp_path / "layouts.json")
    again = load_trace(tmp_path / "layouts.json")
    registry = default_registry().select(["layout"])
    first, second = judge(trace, registry), judge(again, registry)
    assert ("layout.context",) == first.failed == second.failed
    assert first["layout.context"].findings == second["layout.context"].findings
    whole = judge(trace, default_registry())
    assert {"layout"} == {
        r.id.partition(".")[0] for r in whole.results if r.verdict is not Verdict.NOT_APPLICABLE
    }


def test_every_function_is_described_called_and_judged() -> None:
    """The table is the interface: each function says what it takes and gives, has calls, and a
    check of its own reads it.
    """
    for name, function in FUNCTIONS.items():
        assert "->" in function.does
        report = judge_layouts(
            MegatronLike, calls=[(name, call) for call in layout_calls(name, PLAIN, draws=1)]
        )
        own = {"layout.accepts", "layout.returns", "layout.input"}
        assert {r.id for r in report.results if r.verdict is Verdict.PASS} - own, name


class TestMegatronLike(rollproof.ReplayLayoutConformance):
    """The door of test classes: one item per check."""

    subject = MegatronLike
    only = ("layout.context", "layout.layer-map")


@rollproof.conformance(MegatronLike, only=["layout.targets"])
def test_the_door_of_functions(check: CheckResult) -> None:
    """The decorator tells a class of layout functions by its ``layout``."""
    assert check.verdict is Verdict.PASS


def _refusing_short(layout: Layout, samples: Sequence[IntArray], rank: Rank) -> Any:
    if min(map(len, samples)) < 2 * layout.mesh.cp:
        raise NotImplementedError("a sequence shorter than 2 * cp")
    return MegatronLike().context(layout, samples=samples, rank=rank)


def test_a_call_that_is_not_offered_is_left_out() -> None:
    """Lengths are not known to ``supports``: a function says by NotImplementedError that it does
    not take them.
    """
    report = judge_layouts(layout_function("context", _refusing_short, MegatronLike.layout))

    assert [] == [result.id for result in report.results if result.verdict is Verdict.FAIL]
    assert {"layout.context", "layout.accepts"} <= {
        result.id for result in report.results if result.verdict is Verdict.PASS
    }


def test_attributes_of_a_function_are_taken_as_they_are() -> None:
    """``supports`` may be a function as well; what it raises or returns wrongly is told."""
    none = judge_layouts(
        layout_function(
            "context",
            _refusing_short,
            MegatronLike.layout,
            supports=lambda function, layout: "not now",
        )
    )

    assert set() == {result.verdict for result in none.results} & {Verdict.PASS, Verdict.FAIL}
    for supports, message in (
        (lambda *_: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda *_: True, "or None, not True"),
    ):
        with pytest.raises(SubjectError) as caught:
            judge_layouts(
                layout_function("context", _refusing_short, MegatronLike.layout, supports=supports)
            )
        assert message in str(caught.value)
    with pytest.raises(UsageError, match="takes the function to be judged, not a int"):
        layout_function("context", 5, MegatronLike.layout)  # type: ignore[arg-type]


class _Repeats(MegatronLike):
    def divide(self, layout: Layout, samples: Sequence[Any], parts: int) -> list[list[Any]]:
        whole = [*samples, *samples[: -len(samples) % parts]]
        return [whole[part::parts] for part in range(parts)]


class _Drops(MegatronLike):
    def divide(self, layout: Layout, samples: Sequence[Any], parts: int) -> list[list[Any]]:
        return [
            list(samples[part : len(samples) // parts * parts : parts]) for part in range(parts)
        ]


class _RefusesUneven(MegatronLike):
    def divide(self, layout: Layout, samples: Sequence[Any], parts: int) -> list[list[Any]]:
        assert len(samples) % parts == 0, "the batch does not divide"
        return super().divide(layout, samples, parts)


class _LosesOne(MegatronLike):
    def divide(self, layout: Layout, samples: Sequence[Any], parts: int) -> list[list[Any]]:
        return super().divide(layout, samples[:-1] if len(samples) % parts else samples, parts)


@pytest.mark.parametrize(
    ("made", "failed"),
    [(_Repeats, set()), (_Drops, set()), (_RefusesUneven, set()), (_LosesOne, {"layout.samples"})],
)
def test_an_uneven_division_may_repeat_drop_or_refuse(made: Any, failed: set[str]) -> None:
    """Ranks of equal size, by repeating samples or dropping the rest, are right, and so is a
    refusal; losing one in silence is not.
    """
    calls = [("divide", call) for call in layout_calls("divide", PLAIN, draws=12)]
    assert failed == _failing(judge_layouts(made, calls=calls))


class _OneRank(MegatronLike):
    """The functions of a trainer that runs on one rank, and says so."""

    def supports(self, function: str, layout: Layout) -> str | None:
        sizes = (layout.mesh.dp, layout.mesh.tp, layout.mesh.cp, layout.mesh.pp, layout.mesh.vpp)
        return None if sizes == (1,) * 5 and layout.mesh.ulysses == 1 else "it runs on one rank"


class _LongAlone(MegatronLike):
    pass


class _LongRefused(MegatronLike):
    def microbatches(self, layout: Layout, lengths: Sequence[int], most: int) -> Any:
        if max(lengths) > most:
            raise ValueError(f"{max(lengths)} tokens do not fit into {most}")
        return super().microbatches(layout, lengths, most)


class _LongLost(MegatronLike):
    def microbatches(self, layout: Layout, lengths: Sequence[int], most: int) -> Any:
        parts = super().microbatches(layout, lengths, most)
        return [part for part in parts if max(lengths[i] for i in part) <= most]


class _LongWithOthers(MegatronLike):
    def microbatches(self, layout: Layout, lengths: Sequence[int], most: int) -> Any:
        return super().microbatches(layout, lengths, max(most, *lengths, 0) + 2)


@pytest.mark.parametrize(
    ("made", "title"),
    [
        (_LongAlone, None),
        (_LongRefused, None),
        (_LongLost, "a sample is in no microbatch, or in two"),
        (_LongWithOthers, "a microbatch has more tokens than allowed"),
    ],
)
def test_a_sample_longer_than_a_microbatch_is_refused_or_alone(
    made: Any, title: str | None
) -> None:
    """It may not be lost, and not make a microbatch of several larger than the limit."""
    calls = [("microbatches", call) for call in layout_calls("microbatches", PLAIN, draws=0)]
    failed = judge_layouts(made, calls=calls).failed
    assert ([] if title is None else [title]) == [result.findings[0].title for result in failed]


class _MergedByContextSize(MegatronLike):
    def context_merge(
        self, layout: Layout, pieces: Sequence[IntArray], lengths: Sequence[int]
    ) -> Any:
        other = replace(layout, alignment=Alignment(by=("2cp",)))
        return super().context_merge(other, pieces, lengths)


def test_rows_that_are_merged_by_other_padded_lengths_are_in_no_other_order() -> None:
    """The finding names the multiple."""
    calls = [("context_merge", call) for call in layout_calls("context_merge", PLAIN, draws=0)]
    (result,) = judge_layouts(_MergedByContextSize, calls=calls).failed
    titles = {finding.title for finding in result.findings}
    assert {"rows of context-parallel ranks are merged by other padded lengths"} == titles
    assert "rows as multiples of 2 * cp = 6 give" == result.findings[0].observed


def test_ids_of_the_declared_number_of_experts_are_compared() -> None:
    """A compact type may be chosen for that number alone."""
    own = replace(PLAIN, num_experts=129)
    sizes = {call.layout.num_experts for call in layout_calls("compact", own)}
    assert {8, 129, 255, 256, 257, 384, 512} == sizes


def test_on_one_rank_everything_is_judged_that_needs_no_second_one() -> None:
    """Only slices over ranks and virtual stages are ruled out, and the self-test is seen."""
    report = judge_layouts(_OneRank)
    assert {"layout.tensor-slice", "layout.ulysses-slice", "layout.virtual-stages"} == {
        result.id for result in report.results if result.verdict is Verdict.NOT_APPLICABLE
    }
    assert [] == [
        result.id for result in report.results if result.verdict in (Verdict.FAIL, Verdict.UNKNOWN)
    ]
    assert report.canary is not None and report.canary.red


class _OneRankTurned(_OneRank):
    """Installs the targets of the next token."""

    def targets(self, layout: Layout, *arguments: Any, **named: Any) -> Any:
        return {
            layer: np.roll(rows, 1, axis=0)
            for layer, rows in super().targets(layout, *arguments, **named).items()
        }


def test_on_one_rank_a_shifted_row_is_seen() -> None:
    """The cases of one rank tell rows apart."""
    assert "layout.targets" in _failing(judge_layouts(_OneRankTurned))
