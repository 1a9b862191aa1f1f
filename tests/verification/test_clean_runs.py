"""Clean runs: a correct subject ends with exit code 0, because every check is put to the test or
cannot apply to it.
"""

from __future__ import annotations

import importlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.judging.report import Report
from rollproof.verification.rollouts import cases_for, run_conformance

EXAMPLE = Path(__file__).parents[2] / "docs" / "example"
FAULT, REPAIR = (
    "np.concatenate([rows, out.routes])",
    "np.concatenate([rows, out.routes[len(rows) :]])",
)


def undecided(report: Report) -> list[tuple[str, str]]:
    """The checks that failed or stayed unknown, with the reason."""
    return [
        (result.id, result.reason)
        for result in report.results
        if result.verdict in ("fail", "unknown")
    ]


def thinned(factory: Any, flavour: str, step: int) -> Report:
    """Every ``step``-th case of the profile ``pr`` on one flavour."""
    cases = cases_for(factory, profile="pr", seed=0, flavours=[flavour])
    return run_conformance(factory, cases=islice(cases, 0, None, step))


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        ("as-sampled", "vllm"),
        ("as-sampled-moe", "trtllm"),
        ("as-sampled-turns", "sglang"),
        ("as-sampled-untagged", "vllm-0.26"),
        ("latest-prefill", "rows-T"),
        ("engine-keep", "vllm"),
        ("partial-off", "sglang"),
        ("partial-off-surfaced", "vllm-gated"),
    ],
)
def test_no_check_of_a_reference_stays_unknown(name: str, flavour: str) -> None:
    """Whoever resumes, whatever the engine shows: on its own flavour too a reference has neither a
    failed nor an unknown check.
    """
    report = thinned(REFERENCES[name], flavour, 3)

    assert [] == undecided(report)
    assert 0 == report.exit_code


def test_the_example_without_its_fault_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subject as a user writes it, with a contract and a model of its own and no version tags, on
    one flavour.
    """
    client = (EXAMPLE / "my_client.py").read_text(encoding="utf-8")
    assert FAULT in client
    (tmp_path / "my_client.py").write_text(client.replace(FAULT, REPAIR), encoding="utf-8")
    (tmp_path / "example_stack.py").write_text(
        (EXAMPLE / "test_my_stack.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_client", "example_stack"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    report = thinned(importlib.import_module("example_stack").MyStack, "vllm", 2)

    assert [] == undecided(report)
    assert 0 == report.exit_code
