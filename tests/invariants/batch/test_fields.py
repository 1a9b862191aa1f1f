"""Batch checks: a right conversion passes under every contract; each fault is found by its own
check, in words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.training import Batch
from rollproof.core.records import BatchRow, Rollout
from rollproof.invariants import default_registry
from rollproof.judging.checks import Finding, Verdict
from rollproof.judging.report import Report
from rollproof.store import dump_trace, load_trace
from rollproof.verification.batches import judge_batches, record_batches
from rollproof.verification.traces import judge
from tests.support.padded_batches import Padder, padded_contract
from tests.support.trace_builder import contract


def _failing(report: Report) -> set[str]:
    assert [r.reason for r in report.results if "crashed" in r.reason] == []
    return {result.id for result in report.failed}


def _findings(report: Report, check_id: str) -> tuple[Finding, ...]:
    assert _failing(report) == {check_id}
    return next(result for result in report.results if result.id == check_id).findings


@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"filler": "zeros", "dtype": "uint8"},
        {"filler": "arange"},
        {"rows": "T", "final_row": "arange"},
        {"rows": "T", "final_row": "minus-one"},
        {"rows": "T", "final_row": "previous"},
        {"rows": "captured-prefix"},
        {"num_layers": 5, "moe_layers": (1, 3, 4)},
        {
            "num_layers": 5,
            "moe_layers": (1, 3, 4),
            "layer_axis": "moe",
            "num_experts": 1000,
            "top_k": 8,
        },
        {"num_experts": 2, "top_k": 2},
        {"num_experts": 32, "top_k": 1},
        {"abort_surfaces": True},
        {"missing_logprobs": "masked"},
        {"logprobs": "none"},
        {"loss_mask": False},
        {"rows": "none", "dtype": None, "filler": None},
    ],
    ids=str,
)
def test_a_right_conversion_passes(changes: dict[str, Any], mark: bool) -> None:
    """Left and right padding, refusing what disagrees; legal filler is only safe where rows are
    marked or routes are not missing.
    """
    values = {
        key: value
        for key, value in {
            "loss_mask": True,
            "dtype": "int32",
            "filler": "minus-one",
            **changes,
        }.items()
        if value is not None
    }

    def right() -> Padder:
        return Padder(contract(**values), mark)

    report = judge_batches(right)
    legal = values.get("filler") in ("zeros", "arange") and not mark
    assert _failing(report) == ({"batch.mixed"} if legal else set())
    assert report.canary is not None
    assert report.canary.red
    assert {r.verdict for r in report.results} <= {
        Verdict.PASS,
        Verdict.NOT_APPLICABLE,
        *((Verdict.FAIL,) if legal else ()),
    } | ({Verdict.UNKNOWN} if values.get("rows") == "none" else set())


def test_legal_filler_for_a_sample_without_routes_is_found() -> None:
    """Zeros in place of missing routes: expert 0 is replayed for every token."""
    findings = _findings(
        judge_batches(lambda: Padder(padded_contract(filler="zeros"))), "batch.mixed"
    )
    assert findings[0].title == "a sample without routes was given some"
    assert findings[0].observed == "expert 0, 2 times, for 6 tokens that no router chose"
    assert findings[0].where["batch"] == "a sample without routes first"


class _Shifted(Padder):
    """Routes start one place late."""

    def routes(self, sample: Rollout, start: int) -> Any:
        return super().routes(sample, start + 1)


class _RightPadded(Padder):
    """Routes start at place 0 while tokens are padded on the left."""

    def routes(self, sample: Rollout, start: int) -> Any:
        return super().routes(sample, 0 * start)


class _Exchanged(Padder):
    """Two samples change rows of routes."""

    def collate(self, samples: list[Rollout]) -> list[BatchRow]:
        rows = super().collate(samples)
        if len(rows) > 1 and all(sample.routes is not None for sample in samples):
            rows[0], rows[1] = (
                replace(rows[0], routes=rows[1].routes),
                replace(rows[1], routes=rows[0].routes),
            )
        return rows


class _Narrow(Padder):
    """uint8, with 1000 experts."""

    def routes(self, sample: Rollout, start: int) -> Any:
        routes, marks = super().routes(sample, start)
        return routes.astype(np.uint8), marks


class _NoRoutes(Padder):
    """The field is forgotten."""

    def routes(self, sample: Rollout, start: int) -> Any:
        return None, None


class _FirstDecides(Padder):
    """Whether the batch has routes is read off its first sample, as verl's ``_postprocess``
    does.
    """

    def collate(self, samples: list[Rollout]) -> list[BatchRow]:
        rows = super().collate(samples)
        if samples[0].routes is None:
            return [replace(row, routes=None, routed=None) for row in rows]
        if any(sample.routes is None for sample in samples):
            raise TypeError("expected Tensor, got NoneType")
        return rows


class _OneClearsAll(Padder):
    """If one sample has no routes, the rows of all others are filled up."""

    def collate(self, samples: list[Rollout]) -> list[BatchRow]:
        if any(sample.routes is None for sample in samples):
            samples = [replace(sample, routes=None) for sample in samples]
        return super().collate(samples)


class _Rounded(Padder):
    """Logprobs in half precision."""

    def logprobs(self, sample: Rollout, response: slice) -> Any:
        out = super().logprobs(sample, response)
        return out.astype(np.float16).astype(np.float64)


class _LateLogprobs(Padder):
    """Logprobs one place late."""

    def logprobs(self, sample: Rollout, response: slice) -> Any:
        return np.roll(super().logprobs(sample, response), 1)


class _AttentionAsMask(Padder):
    """The attention mask is taken for the loss mask."""

    def row(self, sample: Rollout) -> BatchRow:
        row = super().row(sample)
        return replace(row, loss_mask=row.attention)


class _TrainsPadding(Padder):
    """The response's padding counts in the loss."""

    def row(self, sample: Rollout) -> BatchRow:
        row = super().row(sample)
        assert row.loss_mask is not None
        mask = row.loss_mask.copy()
        mask[self.prompt_width + len(sample.response_ids) :] = 1
        return replace(row, loss_mask=mask)


class _Wrong(Padder):
    """Tokens of the response one place late, attention too."""

    def row(self, sample: Rollout) -> BatchRow:
        row = super().row(sample)
        return replace(row, token_ids=np.roll(row.token_ids, 1))


class _Loses(Padder):
    """The last sample of a batch is forgotten."""

    def collate(self, samples: list[Rollout]) -> list[BatchRow]:
        return super().collate(samples)[:-1] if len(samples) > 1 else super().collate(samples)


class _Repeats(Padder):
    """The batch is filled up with copies."""

    def collate(self, samples: list[Rollout]) -> list[BatchRow]:
        rows = super().collate(samples)
        return [*rows, rows[0]]


class _Writes(Padder):
    """The sample's own mask is zeroed for later use."""

    def collate(self, samples: list[Rollout]) -> list[BatchRow]:
        rows = super().collate(samples)
        for sample in samples:
            if sample.loss_mask is not None and sample.loss_mask.flags.writeable:
                sample.loss_mask[:] = 0
        return rows


class _RefusesReadOnly(Padder):
    """Writes into routes, which engines hand out read-only."""

    def check(self, sample: Rollout) -> None:
        super().check(sample)
        if sample.routes is not None:
            sample.routes[0] = sample.routes[0]


class _WrongFiller(Padder):
    """Declares -1 and fills with zeros."""

    def routes(self, sample: Rollout, start: int) -> Any:
        routes, marks = super().routes(sample, start)
        return np.where(routes < 0, 0, routes) if sample.routes is not None else routes, marks


_ABORTS = padded_contract(abort_surfaces=True)
_MANY = padded_contract(num_experts=1000, top_k=8)
_FAULTS: list[tuple[Callable[[], Padder], str, str]] = [
    (
        _Shifted,
        "batch.routes",
        "token 0's row is at place 6, 1 place away; so for 6 of 6 captured rows (token 0-5)",
    ),
    (_RightPadded, "batch.routes", "token 0's row is at place 0, 5 places away"),
    (_Exchanged, "batch.routes", "so for 6 of 6 captured rows"),
    (_NoRoutes, "batch.routes", "none"),
    (
        lambda: _Narrow(_MANY, mark=True),
        "batch.expert-ids",
        "uint8 holds at most 255; ids were changed",
    ),
    (_FirstDecides, "batch.mixed", "no routes for r"),
    (_OneClearsAll, "batch.mixed", "no routes for r"),
    (
        lambda: _OneClearsAll(padded_contract(filler="arange"), mark=True),
        "batch.mixed",
        "no routes for r",
    ),
    (_Rounded, "batch.logprobs", ", rounded; so at"),
    (_LateLogprobs, "batch.logprobs", "so at 4 tokens of 4"),
    (_AttentionAsMask, "batch.loss-mask", "it counts at 3 tokens (position 0-2)"),
    (_TrainsPadding, "batch.padding", "loss mask 1 at 6 padded places (12-17)"),
    (_Wrong, "batch.tokens", "7 tokens, other ones from number 0 on: [0, 10, 11, 12]"),
    (_Loses, "batch.complete", "no rows for r"),
    (_Repeats, "batch.complete", "2 rows for r0; the batch holds ['r0', 'r0']"),
    (_Writes, "batch.input", "changed: loss_mask of r0"),
    (_RefusesReadOnly, "batch.accepts", "ValueError: assignment destination is read-only"),
    (_WrongFiller, "batch.filler", "zeros at 12 places"),
]


@pytest.mark.parametrize(
    ("factory", "check_id", "words"), _FAULTS, ids=[check for _, check, _ in _FAULTS]
)
def test_one_fault_blames_one_check(
    factory: Callable[[], Padder], check_id: str, words: str
) -> None:
    """Each fault of a conversion is found by its own check and by no other, and the message shows
    it.
    """
    assert words in _findings(judge_batches(factory, name="faulty"), check_id)[0].observed


class _OneWithoutMask(Padder):
    """The first row of a batch has no loss mask; the others train on padding."""

    def collate(self, samples: list[Rollout]) -> list[BatchRow]:
        first, *others = super().collate(samples)
        return [
            replace(first, loss_mask=None),
            *(replace(row, loss_mask=np.ones_like(row.token_ids)) for row in others),
        ]


def test_a_row_without_a_loss_mask_hides_no_other() -> None:
    """It is not judged, and the ones after it are."""
    assert "batch.loss-mask" in _failing(judge_batches(_OneWithoutMask))


class _Careless(Padder):
    """What a conversion without length checks makes of malformed samples: pads and cuts in silence,
    as verl's ``as_dict`` does.
    """

    def check(self, sample: Rollout) -> None:
        pass

    def row(self, sample: Rollout) -> BatchRow:
        total, response = len(sample.prompt_ids + sample.response_ids), len(sample.response_ids)
        fields: dict[str, Any] = {}
        for name in ("logprobs", "loss_mask"):
            field = getattr(sample, name)
            fields[name] = (
                None if field is None else np.concatenate([field, np.zeros(response)])[:response]
            )
        routes = None if sample.routes is None else sample.routes[:total]
        if routes is not None and len(routes) < total - 1:
            short = total - 1 - len(routes)
            routes = np.concatenate(
                [routes, np.zeros((short, *routes.shape[1:]), dtype=routes.dtype)]
            )
        return super().row(replace(sample, routes=routes, **fields))


def test_malformed_samples_that_are_padded_or_cut_are_found() -> None:
    """Short and long routes, logprobs and masks, alone and among others: what each became is
    outcome.
    """
    report = judge_batches(_Careless)
    assert _failing(report) == {"batch.refuses"}
    result = next(result for result in report.results if result.id == "batch.refuses")
    assert result.found == 12
    outcome = {finding.title: finding.observed for finding in result.findings}
    assert (
        outcome["2 route rows for 7 tokens: accepted"]
        == "expert 0, 2 times, is at 4 tokens that have no row, and is replayed"
    )
    assert outcome["9 route rows for 7 tokens: accepted"] == "9 rows were cut to the tokens"
    assert (
        outcome["2 logprobs for 5 response tokens: accepted"]
        == "0 is the value of 3 logprobs that no engine returned"
    )
    assert outcome["8 logprobs for 5 response tokens: accepted"] == "8 were cut to 5 tokens"


class _MakesUpChoices(_Careless):
    """Tokens without a row get experts that a router could have chosen, the final one as well."""

    def routes(self, sample: Rollout, start: int) -> Any:
        routes, marks = super().routes(sample, start)
        if sample.routes is not None and len(sample.routes) == 2:
            places = slice(start + 2, start + len(sample.prompt_ids) + len(sample.response_ids))
            routes[places] = np.array([[1, 4], [2, 5], [3, 6]])
        return routes, marks

    def row(self, sample: Rollout) -> BatchRow:
        return Padder.row(self, sample)


def test_choices_that_were_made_up_are_shown() -> None:
    """Those of the first layer; the final token needs no row, so that its filler is no fault."""
    report = judge_batches(_MakesUpChoices)
    result = next(result for result in report.results if result.id == "batch.refuses")
    outcome = {finding.title: finding.observed for finding in result.findings}
    assert (
        outcome["2 route rows for 7 tokens: accepted"]
        == "experts [1, 4] is at 4 tokens that have no row, and is replayed"
    )


def test_a_short_sample_may_be_kept_where_its_missing_rows_are_marked() -> None:
    """-1, or marks, keep a trainer from replaying missing rows; then the sample need not be
    refused.
    """

    class Marks(Padder):
        def check(self, sample: Rollout) -> None:
            if (
                sample.routes is None
                or len(sample.routes) >= len(sample.prompt_ids + sample.response_ids) - 1
            ):
                super().check(sample)

    for made in (lambda: Marks(), lambda: Marks(padded_contract(filler="zeros"), mark=True)):
        assert _failing(judge_batches(made)) == set()


def test_lengths_that_disagree_within_a_row_are_found() -> None:
    """Malformed fields that are passed on as they came, and well-formed ones that come out
    shorter.
    """

    class PassesOn(Padder):
        def check(self, sample: Rollout) -> None:
            fits = all(
                getattr(sample, name) is None
                or len(getattr(sample, name)) == len(sample.response_ids)
                for name in ("logprobs", "loss_mask")
            )
            if fits:
                super().check(sample)

        def row(self, sample: Rollout) -> BatchRow:
            fits = sample.logprobs is not None and len(sample.logprobs) == len(sample.response_ids)
            row = super().row(sample if fits else replace(sample, logprobs=None))
            return (
                row if fits or sample.logprobs is None else replace(row, logprobs=sample.logprobs)
            )

    report = judge_batches(
        lambda: PassesOn(padded_contract(rows="captured-prefix")), name="passes on"
    )
    assert "2 were put into the batch with 5 tokens" in {
        finding.observed for finding in _findings(report, "batch.refuses")
    }

    class Shorter(Padder):
        def row(self, sample: Rollout) -> BatchRow:
            row = super().row(sample)
            return replace(row, loss_mask=None if row.loss_mask is None else row.loss_mask[:-1])

    finding = _findings(judge_batches(Shorter), "batch.loss-mask")[0]
    assert (finding.title, finding.expected, finding.observed) == (
        "a loss_mask of another length than its row",
        "18 places",
        "17",
    )


def test_an_empty_response_must_not_stop_a_batch() -> None:
    """An aborted sample without tokens may be dropped or kept; refusing the whole batch is
    found.
    """

    class Total(Padder):
        def collate(self, samples: list[Rollout]) -> list[BatchRow]:
            return [self.row(sample) for sample in samples]

    class Divides(Padder):
        def collate(self, samples: list[Rollout]) -> list[BatchRow]:
            assert all(1 / len(sample.response_ids) for sample in samples)
            return super().collate(samples)

    assert _failing(judge_batches(lambda: Total(_ABORTS))) == set()
    findings = _findings(judge_batches(lambda: Divides(_ABORTS)), "batch.accepts")
    # the second one needs what the entire trace shows of mixed batches
    assert [finding.where["batch"] for finding in findings] == [
        "a sample without response tokens, and none with routes",
        "a sample without response tokens",
    ]
    for finding in findings:
        assert finding.kind == "a well-formed batch was refused: ZeroDivisionError"
        assert finding.expected == "rows for 3 samples of 3+4, 3+0, 2+5 tokens"
        assert finding.observed == "ZeroDivisionError: division by zero"


def test_what_refuses_mixed_batches_may_refuse_an_empty_response_without_routes() -> None:
    """It is a sample without routes, too; if no sample has any, the same batch is converted."""

    class Uniform(Padder):
        def collate(self, samples: list[Rollout]) -> list[BatchRow]:
            if len({sample.routes is None for sample in samples}) == 2:
                raise ValueError("all samples have routes, or none")
            return super().collate(samples)

    class OnlyForEmpty(Padder):
        def collate(self, samples: list[Rollout]) -> list[BatchRow]:
            if any(not sample.response_ids and sample.routes is None for sample in samples):
                raise ValueError("no routes")
            return super().collate(samples)

    assert set() == _failing(judge_batches(lambda: Uniform(_ABORTS)))
    assert {"batch.accepts"} == _failing(judge_batches(lambda: OnlyForEmpty(_ABORTS)))


def test_a_missing_logprob_must_not_become_certainty() -> None:
    """0.0 in place of a missing logprob is probability 1, unless the token is masked."""
    values = padded_contract(missing_logprobs="nan")

    class Defaults(Padder):
        def logprobs(self, sample: Rollout, response: slice) -> Any:
            return np.nan_to_num(super().logprobs(sample, response))

    assert _failing(judge_batches(lambda: Padder(values))) == set()
    finding = _findings(judge_batches(lambda: Defaults(values)), "batch.logprobs")[0]
    assert finding.title == "a missing logprob became a number"
    assert finding.observed.startswith("0.000000; so at 1 token of 4")


def test_async_subjects_run_too_and_one_seed_makes_one_trace() -> None:
    """Methods may be coroutines; equal seeds make equal samples, other seeds others."""

    class Async(Padder):
        async def collate(self, samples: list[Rollout]) -> list[BatchRow]:  # type: ignore[override]
            return Padder.collate(self, samples)

        async def rows(self, batch: list[BatchRow]) -> list[BatchRow]:  # type: ignore[override]
            return batch

    def routes(seed: int) -> bytes:
        event = record_batches(Async, seed=seed).events[0]
        assert isinstance(event, Batch)
        assert event.rows[0].routes is not None
        return event.rows[0].routes.tobytes()

    assert _failing(judge_batches(Async)) == set()
    assert routes(1) == routes(1) != routes(2)


def test_a_trace_about_batches_is_stored_and_judged_again(tmp_path: Path) -> None:
    """Written as JSON and read back: the same verdicts, findings and header."""
    trace = record_batches(_Shifted, name="shifted")
    dump_trace(trace, tmp_path / "batches.json")
    again = load_trace(tmp_path / "batches.json")
    registry = default_registry().select(["batch"])
    first, second = judge(trace, registry), judge(again, registry)
    assert again.header == trace.header
    assert first.failed == second.failed == ("batch.routes",)
    assert first["batch.routes"].findings == second["batch.routes"].findings
