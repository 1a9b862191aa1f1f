"""Which fields of a request a fake server answers, ignores and refuses.

The names are those of the request models of SGLang 0.5.21 (``srt/managers/io_struct.py``,
``srt/sampling/sampling_params.py``, ``srt/entrypoints/openai/protocol.py``) and vLLM 0.32
(``entrypoints/openai/*/protocol.py``, ``entrypoints/scale_out/token_in_token_out/protocol.py``,
``sampling_params.py``). A name that is in none of the lists is ignored, as the real servers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from rollproof.fakes.http.request_body import BadRequest

__all__ = ["ANSWERED", "IGNORED", "REFUSED", "refuse_unsupported"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ANSWERED: Mapping[str, frozenset[str]] = {
    "sglang /generate": _names(
        "rid text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num"
        " stream return_routed_experts routed_experts_start_len extra_key cache_salt"
        " lora_path return_sampling_mask"
    ),
    "sglang sampling_params": _names("max_new_tokens n"),
    "sglang /v1/completions": _names(
        "model prompt echo logprobs max_tokens n stream stream_options return_routed_experts"
        " routed_experts_start_len return_token_ids rid extra_key cache_salt lora_path"
    ),
    "sglang /v1/chat/completions": _names(
        "messages model logprobs top_logprobs max_tokens max_completion_tokens n stream"
        " stream_options return_routed_experts routed_experts_start_len return_prompt_token_ids"
        " return_token_ids return_meta_info input_ids rid extra_key cache_salt lora_path"
    ),
    "vllm /v1/completions": _names(
        "model prompt echo logprobs max_tokens n stream stream_options prompt_logprobs request_id"
        " return_tokens_as_token_ids return_token_ids routed_experts_prompt_start cache_salt"
    ),
    "vllm /v1/chat/completions": _names(
        "messages model logprobs top_logprobs max_tokens max_completion_tokens n stream"
        " stream_options prompt_logprobs request_id return_tokens_as_token_ids return_token_ids"
        " routed_experts_prompt_start cache_salt"
    ),
    "vllm /inference/v1/generate": _names(
        "request_id token_ids sampling_params model return_token_ids output_mode stream"
        " stream_options cache_salt"
    ),
    "vllm sampling_params": _names(
        "n max_tokens logprobs prompt_logprobs routed_experts_prompt_start"
    ),
}
"""Fields that change the answer, by server and request model."""

# What a call samples follows from its prompt, the weights and the seed of the server; it ends by
# its own end-of-sequence token, and its words are tokens that no template or stop string concerns.
_SAMPLING = """temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
    logit_bias response_format seed stop stop_token_ids ignore_eos min_tokens stream_interval
    skip_special_tokens spaces_between_special_tokens chat_template_kwargs continue_final_message
    tools tool_choice parallel_tool_calls reasoning_effort user priority session_id"""

IGNORED: Mapping[str, frozenset[str]] = {
    "sglang": _names(
        _SAMPLING
        + """ min_new_tokens no_stop_trim stop_regex custom_params ebnf json_schema regex
        sampling_seed structural_tag task max_thinking_tokens require_reasoning separate_reasoning
        stream_reasoning"""
        # logs
        + """ background custom_labels external_trace_header log_metrics no_logs received_time"""
        # one engine with one rank and one queue
        + """ bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room conversation_id
        data_parallel_rank decode_tp_size disagg_prefill_dp_rank encoder_urls http_worker_ipc
        kv_hints routed_dp_rank routing_key"""
        # the model takes text alone, and SGLang passes over media then
        + """ audio_data image_data image_max_dynamic_patch images_config max_dynamic_patch
        min_dynamic_patch mm_content_hashes mm_hashes modalities need_wait_for_mm_inputs
        num_items_assigned use_audio_in_video video_config video_data video_max_dynamic_patch"""
        # SGLang reads them nowhere, or only with a template for completions
        + """ best_of suffix return_bytes return_entropy"""
    ),
    "vllm": _names(
        _SAMPLING
        + """ allowed_token_ids bad_words extra_args length_penalty repetition_detection
        structured_outputs vllm_xargs watermarking include_stop_str_in_output output_kind
        add_generation_prompt add_special_tokens chat_template detokenize documents
        output_text_buffer_length token_offsets truncation_side include_reasoning reasoning_ended
        reasoning_parser_kwargs thinking_token_budget"""
        # no media come with a request
        + """ media_io_kwargs mm_payload mm_processor_kwargs"""
        # for vLLM's endpoints that render a request and do not run it
        + """ return_mm_kwargs return_token_offsets"""
        # an engine without a connector logs a line, and goes on
        + """ ec_transfer_params kv_transfer_params"""
        # how vLLM's engine stores its answers
        + """ flat_logprobs skip_clone"""
    ),
}
"""Fields that the real servers take and that change no answer of a fake, by server: a correct
client may send them.
"""

REFUSED: Mapping[str, frozenset[str]] = {
    "sglang": _names(
        # states, masks and distributions, of which the coded policy has none
        "return_hidden_states return_indexer_topk return_sampling_mask sampling_logprobs_mode"
        # logprobs of other tokens than the sampled one, and in other forms
        " token_ids_logprob return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64"
        " return_text_in_logprobs"
        # a real server refuses adapters and a client's code, too, unless it was started with them
        " lora_id lora_path custom_logit_processor"
        # sessions, embeddings, scores of items, beams
        " session_params input_embeds positional_embed_overrides multi_item_delimiter_indices"
        " token_indices_to_pool beam_width"
        # details of a reply that the fake does not know, or that another field asks for
        " return_cached_tokens_details return_spec_tokens_details return_input_ids_in_sglext"
        " return_output_ids_in_sglext return_prompt_token_ids"
    ),
    "vllm": _names(
        "logprob_token_ids prompt_logprob_token_ids trace_decode_token_ids prompt_logprob_start"
        # beams, and text between two pieces, which vLLM refuses, too
        " use_beam_search suffix"
        " content_parts features prompt_embeds truncate_prompt_tokens return_prompt_text echo"
        " skip_reading_prefix_cache"
    ),
}
"""Fields of the real servers that the fake cannot answer, by server: to ignore them would be a
wrong answer.
"""

_DEFAULTS: Mapping[str, Any] = {"sampling_logprobs_mode": "selected", "beam_width": 1}
"""Values that a real server assumes where a request has none: a client that writes its defaults
down does not want more than one that leaves them out.
"""


def refuse_unsupported(body: Mapping[str, Any], model: str) -> None:
    """Raise ``BadRequest`` if ``body`` wants what the fake cannot answer.

    A field that is null, false, 0 or empty, or has the server's default, wants nothing; neither
    does a list for a batch that has nothing else in it.

    Args:
        body: fields of a request.
        model: server and request model, a key of ``ANSWERED``.
    """
    for name in body.keys() & _refused(model):
        value = body[name]
        if value and value != _DEFAULTS.get(name) and not _is_empty(value):
            raise BadRequest(
                f"{name} is not supported by rollproof's fake server: leave it out.", param=name
            )


@cache
def _refused(model: str) -> frozenset[str]:
    return frozenset(REFUSED[model.partition(" ")[0]] - ANSWERED[model])


def _is_empty(value: Any) -> bool:
    """Return whether a value is empty, or a list of such; a number in a list is a token."""
    return (
        value is None
        or value is False
        or value == ""
        or value == {}
        or (isinstance(value, list) and all(map(_is_empty, value)))
    )
