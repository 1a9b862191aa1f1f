from __future__ import annotations

import math
from typing import Any

import pytest

from rollproof.core.contract import Contract
from rollproof.corrections import (
    CorrectionTerms,
    Level,
    Metric,
    Rejection,
    Statistic,
    correction_contract,
    correction_function,
)
from rollproof.corrections.correction_subject import correction_terms_of
from rollproof.errors import ContractError, UsageError
from tests.support.random_corrections import random_terms
from tests.support.trace_builder import contract


def test_terms_and_contracts_survive_json() -> None:
    """``from_dict`` reads what ``to_dict`` wrote, rejections and metrics included."""
    for seed in range(60):
        terms = random_terms(seed)
        assert terms == CorrectionTerms.from_dict(terms.to_dict())
        whole = correction_contract(terms)
        assert whole == Contract.from_dict(whole.to_dict())
        assert terms == correction_terms_of(Contract.from_dict(whole.to_dict()))


def test_plain_values_are_taken_for_enums_and_records() -> None:
    """Texts, mappings and a single rejection stand for members, pairs and a tuple."""
    terms = CorrectionTerms(
        level="sequence",  # type: ignore[arg-type]  # as TOML has it
        rejections={"statistic": "k3", "upper": 2},  # type: ignore[arg-type]  # as above
        metrics={"mean": "weights-mean"},  # type: ignore[arg-type]  # as above
    )
    assert Level.SEQUENCE is terms.level
    assert (Rejection(statistic=Statistic.K3, upper=2),) == terms.rejections
    assert (("mean", Metric.WEIGHTS_MEAN),) == terms.metrics


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"level": "row"}, r"level='row' is not valid; choose one of \['token'"),
        ({"upper": 0}, "upper=0 must be a number above 0"),
        ({"lower": 3.0, "upper": 2.0}, "lower=3 is above upper=2: nothing would be kept"),
        ({"upper": math.nan}, "upper=nan must be a finite number"),
        ({"metrics": {"mean": "avg"}}, r"metrics\['mean'\]='avg' is not valid"),
        ({"metrics": ["mean"]}, "metrics must map the name"),
        ({"rejections": [{"statistic": "k1"}]}, "a rejection needs a lower or an upper bound"),
        ({"rejections": [{"lower": -1.0}]}, "bounds of a ratio must be above 0"),
        ({"rejections": [3]}, "must hold rollproof.corrections.Rejection only"),
        ({"rejections": 3}, "rejections=3 must be a tuple"),
        ({"weights": "yes"}, "weights='yes' must be True or False"),
        ({"weights": False}, "weights=False needs rejections, or a loss"),
        ({"weights": False, "upper": 2.0, "loss": "ppo"}, "upper contradicts weights=False"),
        ({"max_staleness": 2}, "max_staleness and stale belong together"),
        ({"max_staleness": True, "stale": "drop"}, "max_staleness=True must be a whole number"),
        ({"gradient": "current"}, "gradient='current' contradicts pair='old/rollout'"),
        (
            {"gradient": "current", "pair": "current/old", "normalise": "tokens"},
            "gradient='current' contradicts normalise",
        ),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' contradicts arrays='numpy'"),
        (
            {"pair": "interpolated/rollout", "max_staleness": 1, "stale": "drop"},
            "max_staleness=1 contradicts pair='interpolated/rollout'",
        ),
        ({"uper": 2.0}, r"Unknown correction terms \['uper'\]"),
    ],
)
def test_terms_that_cannot_be_used_are_refused(declared: dict[str, Any], words: str) -> None:
    """The error names the term, its value, and what would be valid."""
    with pytest.raises(ContractError, match=words):
        correction_contract(**declared)


def test_all_problems_are_listed_at_once() -> None:
    """A first attempt learns everything from one error."""
    with pytest.raises(ContractError) as caught:
        correction_contract(level="row", upper=-1.0, metrics={"mean": "avg"})
    assert 3 == str(caught.value).count("\n  - ")


def test_a_contract_is_made_of_terms_or_of_fields() -> None:
    """Both at once would hide one of them; other contracts have no terms."""
    with pytest.raises(ContractError, match="Give the terms or their fields, not both"):
        correction_contract(CorrectionTerms(), upper=2.0)
    with pytest.raises(ContractError, match="declares no correction terms"):
        correction_terms_of(contract())


def test_a_function_must_be_callable() -> None:
    """A result in place of the function is a mistake of the caller."""
    with pytest.raises(UsageError, match="takes the function to be judged, not a float"):
        correction_function(1.0, upper=2.0)  # type: ignore[arg-type]  # the mistake


def test_a_rejection_reads_as_a_rule() -> None:
    """Findings quote it."""
    assert "0.5 <= ratio <= 2" == str(Rejection(lower=0.5, upper=2.0))
    assert "mean of k3 over a sequence <= 0.1 for negative advantages" == str(
        Rejection(statistic="k3", aggregate="mean", upper=0.1, advantages="negative")  # type: ignore[arg-type]  # texts
    )
