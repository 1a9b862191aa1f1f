"""Calibration: facts of an experiment differ by conventions, not by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollproof.core.engine_protocol import Query, Watch
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.core.trace import Trace
from rollproof.engines.calibration import differences, facts
from rollproof.engines.engine_targets import fake_target
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.verification.engines import run_experiments


def _run(flavour: str, seed: int = 0) -> list[Trace]:
    return run_experiments(fake_target(flavour, seed=seed), seed=seed).traces


def test_facts_are_free_of_chance() -> None:
    """Two runs with other prompts, tokens and moments of aborts show the same facts in every
    experiment.
    """
    for flavour in ("vllm", "sglang"):
        assert {} == differences(_run(flavour, 1), _run(flavour, 2))


def test_other_conventions_are_other_facts() -> None:
    """The two engines part in dtype, in what an abort in the queue shows and in who gets routes;
    each fact names its run.
    """
    found = differences(_run("vllm"), _run("sglang"), names=("vllm", "sglang"))
    assert (
        "sglang only: a call with routes that ended by length: rows are of int32" in found["plain"]
    )
    assert (
        "vllm only: a call with no routes that ended by length: rows are of uint8"
        in found["opt-in"]
    )
    assert any("cached tokens are not reported" in fact for fact in found["queued"])


class _Longer(FakeEngineSubject):
    """Forgets to cut the row of the step that an abort overtook."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        outputs = await super().generate(query, watch)
        return [
            (
                replace(output, routes=np.concatenate([output.routes, output.routes[-1:]]))
                if output.routes is not None
                and output.token_ids
                and output.finish_reason is FinishReason.ABORT
                else output
            )
            for output in outputs
        ]


def test_a_wrong_fake_is_noticed() -> None:
    """One row too many after an abort is a fact that the correct engine does not show."""
    wrong = run_experiments(
        fake_target("vllm", make=lambda settings: _Longer(settings, "vllm")), only=["resent"]
    ).traces
    right = run_experiments(fake_target("vllm"), only=["resent"]).traces
    assert (
        "fake only: a call with routes that aborted with tokens: +1 rows in addition to those that"
        " are due" in (differences(wrong, right)["resent"])
    )
    assert facts(right[0]) == facts(right[0])


def test_whether_a_call_reaches_an_end_token_is_no_fact() -> None:
    """Calls that may end by themselves and end by length leave no facts; those that stop do."""
    (trace,) = run_experiments(fake_target("vllm"), only=["ends"]).traces
    assert not any("ended by length" in fact for fact in facts(trace))
    assert any("ended by stop" in fact for fact in facts(trace))
    (plain,) = run_experiments(fake_target("vllm"), only=["plain"]).traces
    assert any("ended by length" in fact for fact in facts(plain))
