"""Which sampling parameters the real servers take, and in which ranges.

The fake samples the same whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from rollproof.fakes.http.request_body import BadRequest, UncaughtError, field
from rollproof.fakes.http.supported_fields import refuse_unsupported

__all__ = ["check_sglang", "check_vllm", "check_vllm_request", "vllm_salt"]

_NUMBER = (int, float)
Rule = tuple[type | tuple[type, ...], Callable[[Any], bool], str]
"""The type of a value, whether it is in range, and the server's words for the range."""

_PENALTY: Rule = (_NUMBER, lambda value: -2.0 <= value <= 2.0, "in [-2, 2]")
_TOP_P: Rule = (_NUMBER, lambda value: 0.0 < value <= 1.0, "in (0, 1]")
_MIN_P: Rule = (_NUMBER, lambda value: 0.0 <= value <= 1.0, "in [0, 1]")
_SGLANG: Mapping[str, Rule | None] = {
    "temperature": (
        _NUMBER,
        lambda value: isfinite(value) and value >= 0.0,
        "a non-negative finite number",
    ),
    "top_p": _TOP_P,
    "top_k": (int, lambda value: value == -1 or value >= 1, "-1 (disable) or at least 1"),
    "min_p": _MIN_P,
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": (
        _NUMBER,
        lambda value: 0.0 < value <= 2.0,
        "in (0, 2] (1.0 = no penalty)",
    ),
    "min_new_tokens": (int, lambda value: value >= 0, "in [0, max_new_tokens]"),
    "max_new_tokens": (int, lambda value: value >= 0, "at least 0"),
    **dict.fromkeys(
        (
            "stop",
            "stop_token_ids",
            "stop_regex",
            "n",
            "beam_width",
            "json_schema",
            "regex",
            "ebnf",
            "structural_tag",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "no_stop_trim",
            "stream_interval",
            "logit_bias",
            "sampling_seed",
            "custom_params",
        )
    ),
}
"""The fields of SamplingParams of SGLang 0.5.21 (srt/sampling/sampling_params.py), and the rules of
its ``verify``.
"""
_VLLM: Mapping[str, Rule] = {
    "temperature": (_NUMBER, lambda value: value >= 0, "non-negative"),
    "top_p": _TOP_P,
    "top_k": (int, lambda value: value >= -1, "0 (disable), or at least 1"),
    "min_p": _MIN_P,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (_NUMBER, lambda value: value > 0.0, "greater than zero"),
    "min_tokens": (int, lambda value: value >= 0, "greater than or equal to 0"),
}
"""The rules of SamplingParams of vLLM 0.32 (sampling_params.py, ``_verify_args``); other fields are
not checked.
"""
_NAMED_BY_VLLM = ("temperature", "top_p")
"""Fields that vLLM names in ``param`` of its error."""
_FORBIDDEN_IN_SALTS = frozenset("@/\\\0")


def check_sglang(sampling: Mapping[str, Any]) -> None:
    """Check the sampling parameters of one prompt.

    Raises:
        BadRequest: a value is out of range.
        UncaughtError: a name is unknown; SGLang does not catch the TypeError.
    """
    if not sampling.keys() <= _SGLANG.keys():
        raise UncaughtError(f"sampling_params has {sorted(sampling.keys() - _SGLANG.keys())}")
    refuse_unsupported(sampling, "sglang sampling_params")
    for name in sampling:
        rule = _SGLANG[name]
        if rule is not None:
            _check(sampling, name, rule)
    maximum = sampling.get("max_new_tokens")
    if maximum is not None and (sampling.get("min_new_tokens") or 0) > maximum:
        raise BadRequest(
            f"min_new_tokens must be in [0, max_new_tokens({maximum})], got"
            f" {sampling['min_new_tokens']}."
        )


def check_vllm(sampling: Mapping[str, Any], samples: int, budget: int | None) -> None:
    """Check sampling parameters of ``samples`` samples with at most ``budget`` tokens each.

    Raises:
        BadRequest: a value is out of range, greedy sampling of several samples, or ``min_tokens``
            above the budget.
    """
    for name in _VLLM.keys() & sampling.keys():
        _check(sampling, name, _VLLM[name])
    if samples > 1 and sampling.get("temperature") == 0:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {samples}.")
    minimum = sampling.get("min_tokens") or 0
    # a budget of 0 has a refusal of its own
    if budget is not None and 0 < budget < minimum:
        raise BadRequest(
            f"min_tokens must be less than or equal to max_tokens={budget}, got {minimum}."
        )


def check_vllm_request(body: Mapping[str, Any]) -> None:
    """Raise ``BadRequest`` for fields of an OpenAI request that do not go together."""
    if body.get("stream_options") and not body.get("stream"):
        raise BadRequest(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    top = body.get("top_logprobs")
    if isinstance(top, int) and (top > 0 or top == -1) and not body.get("logprobs"):
        raise BadRequest(
            "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
        )
    if body.get("stream") and field(body, "prompt_logprobs", int, 0):
        raise BadRequest(
            "`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs"
        )
    if body.get("tools") == []:
        raise BadRequest("`tools` must not be an empty array.", param="tools")


def vllm_salt(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the request's ``cache_salt``, if it has one, as a parameter of its calls.

    Raises:
        BadRequest: vLLM refuses it.
    """
    salt = body.get("cache_salt")
    if salt is None:
        return {}
    if not isinstance(salt, str) or not salt:
        raise BadRequest(
            "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
        )
    if len(salt) > 128 or not _FORBIDDEN_IN_SALTS.isdisjoint(salt):
        raise BadRequest(
            "Parameter 'cache_salt' must be at most 128 characters, without '@', '/', '\\\\' and"
            " NUL.",
            param="cache_salt",
        )
    return {"cache_salt": salt}


def _check(sampling: Mapping[str, Any], name: str, rule: Rule) -> None:
    kind, in_range, words = rule
    value = field(sampling, name, kind, None)
    if value is not None and not in_range(value):
        raise BadRequest(
            f"{name} must be {words}, got {value}.",
            param=name if name in _NAMED_BY_VLLM else None,
        )
