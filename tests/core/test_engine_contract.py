"""Engine terms: what cannot be meant is refused by name, never with an error of Python's own."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.engine_contract import EngineTerms, PauseMode, SamplingOption
from rollproof.errors import ContractError


def _terms(**changes: Any) -> EngineTerms:
    return EngineTerms(**{"max_length": 64, "pause_modes": (PauseMode.ABORT,), **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_length": "64"}, "max_length='64' must be a whole number of tokens, at least 2"),
        ({"max_length": None}, "max_length=None must be a whole number of tokens, at least 2"),
        (
            {"prompt_margin": None},
            "prompt_margin=None must be a whole number of tokens, at least 1",
        ),
        (
            {"prompt_margin": True},
            "prompt_margin=True must be a whole number of tokens, at least 1",
        ),
        ({"prompt_margin": 64}, "prompt_margin=64 leaves no token of max_length=64"),
        (
            {"spare_positions": -1},
            "spare_positions=-1 must be a whole number of tokens, at least 0",
        ),
        ({"spare_positions": 64}, "spare_positions=64 leaves no token of max_length=64"),
        ({"end_tokens": 5}, "end_tokens must be a tuple of token ids, not 5"),
        ({"end_tokens": None}, "end_tokens must be a tuple of token ids, not None"),
        ({"end_tokens": {3: 4}}, "end_tokens must be a tuple of token ids, not a dict of 1"),
        ({"end_tokens": (2, -1)}, "end_tokens=-1 must be a token id: a whole number from 0 to"),
        ({"end_tokens": (1 << 31,)}, "end_tokens=2147483648 must be a token id"),
        ({"sampling": 3}, r"sampling holds 3; choose among \['top_p'"),
        ({"sampling": None}, "sampling holds None; choose among"),
        ({"sampling": "top_p"}, "sampling holds 'top_p'; choose among"),
        ({"pause_modes": 5}, r"pause_modes holds 5; choose among \['abort'"),
        ({"keys_finished": (3,)}, "keys_finished holds 3; choose among"),
        ({"paused_calls": None}, "paused_calls holds None; choose among"),
        ({"penalised_logprobs": "x"}, "penalised_logprobs must be a bool or None, not 'x'"),
        ({"repetition_over_prompt": None}, "repetition_over_prompt must be a bool, not None"),
        ({"seeded": 1}, "seeded must be a bool, not 1"),
    ],
    ids=str,
)
def test_wrong_terms_are_refused(changes: dict[str, Any], problem: str) -> None:
    """Values of a wrong type or size are named with the field and what is valid."""
    with pytest.raises(ContractError, match=problem):
        _terms(**changes)


@pytest.mark.parametrize(
    "text",
    [3, b"t{}", "", "plain", "{", "{}{}", "{foo}", "{0.real.x}", "{:z}", "{:.1s}", "{!r:.1}"],
    ids=str,
)
def test_a_text_of_tokens_tells_them_apart(text: Any) -> None:
    """A format that fails, or under which tokens look alike, makes no stop strings."""
    with pytest.raises(ContractError, match="must be a format of one token id, such as"):
        _terms(token_text=text)


@pytest.mark.parametrize("text", ["{}", "t{:03d} ", "<{0}>", "{:x}", "{{{}}}"])
def test_any_format_of_one_token_is_a_text(text: str) -> None:
    """Every engine writes tokens in a way of its own."""
    assert text == _terms(token_text=text).token_text


def test_plain_names_in_lists_are_read() -> None:
    """Terms come from JSON: lists of names become tuples of members. No pause mode is a term, too:
    not every adapter of an engine can pause it.
    """
    terms = _terms(pause_modes=[], sampling=["top_k"], end_tokens=[2, 5])
    assert ((), (SamplingOption.TOP_K,), (2, 5)) == (
        terms.pause_modes,
        terms.sampling,
        terms.end_tokens,
    )


def test_problems_come_at_once() -> None:
    """One edit mends several terms."""
    with pytest.raises(ContractError) as caught:
        _terms(prompt_margin=None, end_tokens=5, sampling=3)
    assert ["prompt_margin", "end_tokens", "sampling"] == [
        name for name in ("prompt_margin", "end_tokens", "sampling") if name in str(caught.value)
    ]
