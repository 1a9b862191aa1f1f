"""Batch checks on both sides of their bounds: types of ids, and fields of malformed samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.records import BatchRow, FinishReason, Rollout
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.verification.batch_cases import BatchCase
from rollproof.verification.batches import judge_batches
from tests.support.padded_batches import Padder, padded_contract


def _result(check_id: str, made: Callable[[], Padder], *cases: BatchCase) -> CheckResult:
    report = judge_batches(made, cases=cases or None)
    assert [] == [result.reason for result in report.results if "crashed" in result.reason]
    return next(result for result in report.results if result.id == check_id)


def _sample(largest: int) -> Rollout:
    """Three tokens and two more, with rows that hold ids up to ``largest``."""
    routes = np.zeros((4, 3, 2), dtype=np.int32)
    routes[..., 1] = 1
    routes[2, 1, 1] = largest
    return Rollout(
        request_id="r0",
        prompt_ids=(11, 12, 13),
        response_ids=(14, 15),
        logprobs=np.array([-1.0, -2.0]),
        loss_mask=np.array([1, 1]),
        routes=routes,
        finish_reason=FinishReason.LENGTH,
    )


@pytest.mark.parametrize(
    ("experts", "through", "stored", "observed"),
    [
        (256, "uint8", "uint8", None),
        (257, "uint8", "uint8", "uint8 holds at most 255"),
        (128, "int8", "int8", None),
        (129, "int8", "int8", "int8 holds at most 127"),
        (300, "uint8", "int64", "uint8 holds at most 255; ids were changed"),
        (300, "int64", "int64", None),
    ],
)
def test_a_type_holds_the_largest_id_or_is_named(
    experts: int, through: str, stored: str, observed: str | None
) -> None:
    """A type that holds num_experts - 1 is enough; one that does not is found although no id of
    these samples was changed, and a narrow one on the way where ids were.
    """

    class Cast(Padder):
        def routes(self, sample: Rollout, start: int) -> Any:
            routes, marks = super().routes(sample, start)
            return routes.astype(through).astype(stored), marks

    contract = padded_contract(num_experts=experts, filler="zeros")
    largest = 299 if observed is not None and "changed" in observed else 100
    case = BatchCase(name="one sample", samples=(_sample(largest),))
    result = _result("batch.expert-ids", lambda: Cast(contract, mark=True), case)
    assert {"rows with routes": 1} == dict(result.exercised)
    if observed is None:
        assert Verdict.PASS == result.verdict, result.findings
        return
    finding = result.findings[0]
    assert (f"{through} does not hold every expert id", observed) == (
        finding.title,
        finding.observed,
    )
    assert f"a type that holds ids up to {experts - 1}" == finding.expected


def test_an_array_of_other_layers_says_which_shape_it_should_have() -> None:
    """Expected are the layers and top_k of the sample."""

    class Narrow(Padder):
        def routes(self, sample: Rollout, start: int) -> Any:
            routes, marks = super().routes(sample, start)
            return routes[:, :2], marks

    case = BatchCase(name="one sample", samples=(_sample(5),))
    finding = _result("batch.routes", Narrow, case).findings[0]
    assert ("the routes have another shape", "(places, 3, 2)", "(18, 2, 2)") == (
        finding.title,
        finding.expected,
        finding.observed,
    )


class _Short(Padder):
    """Logprobs that are too few are filled up with zeros, and the filled ones are masked."""

    masks = True

    def row(self, sample: Rollout) -> BatchRow:
        assert sample.logprobs is not None
        missing = len(sample.response_ids) - len(sample.logprobs)
        row = super().row(replace(sample, logprobs=np.append(sample.logprobs, [0.0] * missing)))
        assert row.loss_mask is not None
        mask = row.loss_mask.copy()
        if self.masks:
            end = self.prompt_width + len(sample.response_ids)
            mask[end - missing : end] = 0
        return replace(row, loss_mask=mask)


@pytest.mark.parametrize("masks", [True, False])
def test_filled_logprobs_are_harmless_where_they_are_masked(masks: bool) -> None:
    """A token that is masked out trains on nothing; one that counts trains on a made-up value."""

    class Filling(_Short):
        pass

    Filling.masks = masks
    sample = replace(_sample(5), logprobs=np.array([-1.0]))
    case = BatchCase(
        name="a short logprob", samples=(sample,), defect="1 logprob for 2 tokens", defective="r0"
    )
    result = _result("batch.refuses", Filling, case)
    assert {"malformed samples": 1} == dict(result.exercised)
    observed = [] if masks else ["0 is the value of 1 logprob that no engine returned"]
    assert observed == [finding.observed for finding in result.findings]


@pytest.mark.parametrize(
    ("logprobs", "masked", "found"),
    [
        (None, 1, False),
        ((-1.0, np.nan), 1, False),
        ((np.nan, -1.0), 0, False),
        ((np.nan, np.nan), 1, False),
        ((np.nan, -1.0), 1, True),
        ((-1.0, np.nan), 0, True),
        ((-1.0, -2.0), 1, True),
    ],
)
def test_a_token_without_a_logprob_may_be_masked(
    logprobs: tuple[float, float] | None, masked: int, found: bool
) -> None:
    """It has no importance ratio; one that has a logprob counts."""

    class Masking(Padder):
        def row(self, sample: Rollout) -> BatchRow:
            row = super().row(sample)
            assert row.loss_mask is not None
            mask = row.loss_mask.copy()
            mask[self.prompt_width + masked] = 0
            return replace(row, loss_mask=mask)

    values = None if logprobs is None else np.array(logprobs)
    case = BatchCase(name="one sample", samples=(replace(_sample(5), logprobs=values),))
    result = _result("batch.loss-mask", Masking, case)
    assert found is bool(result.found), result
    for finding in result.findings:
        assert "the loss leaves out trained tokens" == finding.title
        assert 3 + masked == finding.where["position"]
