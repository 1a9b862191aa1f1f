"""Where a fake server is known to differ from the recorded one, and why. An entry that excuses
nothing any more is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

DISABLED = ("vllm_generate_disabled",)
"""Kinds that were recorded on a server which had the endpoint switched off."""
SKIPPED: Mapping[str, str] = {
    "sglang_update_weights_from_disk-1": "the fake has no disk: every path is weights",
    "vllm_chat_bad-3": (
        "the fake serves models of every name: a stack may call its policy as it likes"
    ),
    "vllm_completions_bad-7": "the same",
    "vllm_generate-18": "the same",
    **dict.fromkeys(
        ("vllm_weights-0", "vllm_weights-2", "vllm_weights-3", "vllm_weights-5", "vllm_weights-6"),
        "the recorded server had no transfer engine, and failed; the fake has one",
    ),
}
"""Exchanges that are not compared, with the reason."""
CHANCE: Mapping[str, str] = {
    **dict.fromkeys(
        ("vllm_abort-3", "vllm_abort-5", "vllm_abort-7"),
        "there the abort came before the first token, here mostly after it",
    ),
    "vllm_completions_stream-3": "two samples at once: whose events come last is chance",
}
"""Exchanges that are not compared, because both outcomes are right and chance decides."""
STATUS_ONLY: Mapping[str, str] = {
    "sglang_info-2": "the complete start-up configuration; the fake has the part that stacks read",
    "sglang_info-3": "the same",
    "vllm_collective_rpc-4": "what a worker's method returns is the worker's",
    "vllm_weights-7": "checksums by the names of tensors",
    "vllm_health-4": "permissions of the model card, which no stack reads",
}
"""Exchanges of which only status and media type are compared, with the reason."""
UNSTEADY = (
    # an object where a prefix was cached, else null: it depends on what ran before
    "cached_tokens_details",
    "logprobs.top_logprobs[]",  # its keys are words
    "content[].top_logprobs",  # the fake has the sampled token's logprob, and no others
    "disable_health_check",  # an option that the gateway was recorded with
)
"""Places whose content depends on more than the request."""
_LOADS = (
    "decode_moments",
    "disaggregation",
    "memory",
    "queues",
    "total_prefill_busy_us",
    "total_prefill_uncached_tokens",
)
MISSING: Mapping[str, tuple[str, ...]] = {
    "/model_info": ("embedding",),
    "/get_model_info": ("embedding",),
    "/v1/loads": _LOADS,
}
"""Keys by path that the fake server leaves out: deployments that the fake does not stand for."""
EXTRA: Mapping[str, tuple[str, ...]] = {}
"""Keys by path that it has beyond, or of another kind."""
