"""``stitch.budget-used``: every sample that ends by length ends one token too early."""

from __future__ import annotations

from rollproof.core.records import FinishReason
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, finds, inapplicable, passes, unknown

ID = "stitch.budget-used"


def story(
    *requests: tuple[int, int],
    prompts: tuple[int, ...] = (),
    reason: str = "length",
    **contract: object,
) -> TraceScript:
    """One request for each ``(budget, tokens granted and sampled)``; ``prompts`` are their lengths
    (2).
    """
    out: TraceScript | None = None
    for number, (budget, grant) in enumerate(requests):
        prompt = tuple(
            range(100 * number + 1, 100 * number + 1 + (prompts[number] if prompts else 2))
        )
        part = ScriptedCall(
            tokens=tuple(range(500, 500 + grant)), reason=reason, call={"max_tokens": grant}
        )
        sample = {"finish_reason": FinishReason(reason)}
        out = script_rollout(
            part,
            request_id=f"r{number}",
            prompt=prompt,
            budget=budget,
            sample=sample,
            script=out,
            **contract,
        )
    assert out is not None
    return out


def test_one_token_less_at_every_budget_is_found() -> None:
    """A comparison that is off by one; in a recording, no single sample shows it."""
    result = story((2, 1), (5, 4), (9, 8))
    finding = finds(ID, result)
    assert "All 3 samples that end by length end one token before their budget" == finding.title
    assert ("2 and 9 tokens, the callers' budgets", "r2") == (
        finding.expected,
        finding.where["request"],
    )
    assert finding.observed.startswith("1 and 8 tokens")
    assert {ID, "stitch.finish-length"} == blamed(result)


def test_caps_of_the_stacks_own_pass() -> None:
    """One cap for all, a context's length, a portion of the budget, a budget that was used once."""
    passes(ID, story((4, 4), (20, 4)), ends_by_length_at_different_budgets=1)
    passes(ID, story((5, 4), (15, 14), prompts=(15, 5)))
    passes(ID, story((5, 4), (20, 16)))
    passes(ID, story((2, 1), (9, 8), (6, 6)))


def test_budgets_that_are_close_tell_nothing() -> None:
    """A cap in proportion to the budget falls one short of both."""
    unknown(
        ID,
        story((5, 4), (6, 5)),
        "no two requests of a trace ended by length at budgets three times apart",
    )
    unknown(ID, story((2, 1), (9, 8), reason="stop"), "no two requests")


def test_a_stack_without_finish_reasons_says_nothing() -> None:
    """Nothing ends by length."""
    inapplicable(ID, story((2, 1), (9, 8), finish_reason=False), "declares no finish reason")
