"""``stitch.turn-budget``: later turns have the budget that the first one had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, finds, inapplicable, passes, unknown

ID = "stitch.turn-budget"
FIRST = ScriptedCall(tokens=(11, 12), reason="stop", call={"max_tokens": 20})
TURNS: dict[str, Any] = {"multi_turn": True, "loss_mask": True, "answer_template": False}


def story(*parts: ScriptedCall, budget: int | None = 20, **changes: Any) -> TraceScript:
    """A conversation under a budget of 20 tokens for all turns."""
    return script_rollout(*parts, budget=budget, **{**TURNS, **changes})


def second(size: int, grant: int, **changes: Any) -> ScriptedCall:
    """A turn after two tokens of the environment: what it sampled, of what it was granted."""
    return ScriptedCall(
        **{
            "tokens": tuple(range(31, 31 + size)),
            "reason": "length",
            "observed": (21, 22),
            "call": {"max_tokens": grant},
            **changes,
        }
    )


def test_a_smaller_grant_of_a_later_turn_is_found() -> None:
    """Of 20 tokens 4 are used, and the turn may sample 3."""
    cut = story(FIRST, second(3, 3))
    finding = finds(ID, cut)
    assert (
        "Turn 1 of the model was cut at 3 tokens, although 16 were left",
        (
            "it ended by length after 3 tokens: max_tokens=3 in call 2 (to server s0),"
            " max_tokens=20 in the first call"
        ),
        2,
        4,
    ) == (finding.title, finding.observed, finding.where["call"], finding.where["index"])
    assert finding.expected.startswith("16 tokens of turn 1, or its natural end")
    assert "limits={'turn_tokens': most}" in finding.hint
    assert {ID, "stitch.finish-length"} == blamed(cut)


def test_one_token_less_than_is_left_is_found() -> None:
    """The last token of the budget counts; with it, the turn is complete."""
    finds(ID, story(FIRST, second(15, 15)))
    passes(ID, story(FIRST, second(16, 16)), turns_after_an_answer_of_the_environment=1)


def test_the_turn_in_the_middle_is_judged_too() -> None:
    """Turns are numbered from 0, and one that the environment answered may have been cut."""
    parts = (FIRST, second(3, 3), second(2, 11, reason="stop"))
    finding = finds(ID, story(*parts, limits={"response": 64}))
    assert finding.title.startswith("Turn 1 of the model was cut at 3 tokens")


@pytest.mark.parametrize(
    "parts",
    [
        (FIRST, second(3, 3, reason="stop")),
        (FIRST, second(3, 16, reason="abort"), ScriptedCall(tokens=(41,), reason="stop")),
        (FIRST, second(3, 4)),
        (
            FIRST,
            second(8, 8),
            ScriptedCall(tokens=tuple(range(51, 59)), reason="length", call={"max_tokens": 8}),
        ),
        (
            ScriptedCall(tokens=(11, 12), reason="stop", call={"max_tokens": 7}),
            second(3, 3),
        ),
        (
            ScriptedCall(tokens=(11, 12), reason="stop", call={"max_tokens": 5}),
            second(5, 5),
        ),
    ],
    ids=[
        "a natural end",
        "an abort",
        "the engine's own limit",
        "portions",
        "what the first call was granted less what is used",
        "a limit of the stack's own for all turns",
    ],
)
def test_other_ends_of_later_turns_pass(parts: tuple[ScriptedCall, ...]) -> None:
    """A turn that ended by itself, a resumed one, one that the engine ended below its grant, one in
    portions that use up what is left, and every reading of a limit that the first call shows.
    """
    passes(ID, story(*parts), turns_after_an_answer_of_the_environment=1)


@pytest.mark.parametrize(("last", "found"), [(33, False), (32, True)])
@pytest.mark.parametrize("name", ["end_tokens", "stop_token_ids"])
def test_a_turn_that_ended_by_itself_at_its_grant_passes(name: str, last: int, found: bool) -> None:
    """Its last token ends it, so ``length`` is one of two right reasons; another one does not."""
    cut = second(3, 3, call={"max_tokens": 3, name: (last,)})
    if found:
        finds(ID, story(FIRST, cut))
    else:
        passes(ID, story(FIRST, cut), turns_after_an_answer_of_the_environment=1)


def test_a_declared_limit_of_turns_holds_for_every_turn() -> None:
    """The declared limit cuts a turn; half of it does not, although the first call was granted no
    more than one turn.
    """
    limited = {"limits": {"turn_tokens": 6}}
    first = ScriptedCall(tokens=(11, 12), reason="stop", call={"max_tokens": 6})
    passes(ID, story(first, second(6, 6), **limited))
    finds(ID, story(first, second(3, 3), **limited))


def test_no_stated_budget_leaves_nothing_to_compare() -> None:
    """Neither the caller nor the first call states one."""
    first = ScriptedCall(tokens=(11, 12), reason="stop", call={"max_tokens": None})
    passes(ID, story(first, second(3, 3), budget=None))


def test_declared_limits_are_budgets() -> None:
    """They bound a later turn where the caller states no budget."""
    first = ScriptedCall(tokens=(11, 12), reason="stop", call={"max_tokens": None})
    for limits, most in (({"response": 9}, 5), ({"length": 9}, 3)):
        passes(ID, story(first, second(most, most), budget=None, limits=limits))
        finds(ID, story(first, second(most - 1, most - 1), budget=None, limits=limits))


def test_a_single_turn_is_not_judged() -> None:
    """Without turns of the environment there are no later ones."""
    alone = ScriptedCall(tokens=(11, 12), reason="length", call={"max_tokens": 2})
    inapplicable(
        ID,
        script_rollout(alone, budget=20),
        "the contract declares no turns of the environment (multi_turn)",
    )
    unknown(ID, story(alone), "no turn was answered")
