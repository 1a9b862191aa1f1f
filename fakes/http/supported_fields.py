"""Request fields: what of the real servers' requests a face answers, what it refuses, and what
changes nothing of a fake's answer.

Every field of the request models of SGLang 0.5.21 (``srt/managers/io_struct.py``,
``srt/sampling/sampling_params.py``, ``srt/entrypoints/openai/protocol.py``) and vLLM 0.32
(``entrypoints/openai/*/protocol.py``, ``entrypoints/scale_out/token_in_token_out/protocol.py``,
``sampling_params.py``) is in one of the three. A name that no model has is passed over, as the
servers do. Those of SGLang 0.5.17 and vLLM 0.26.0 were compared, too: three names of theirs are
gone since, of media and of masks (``mm_data_mooncake``, ``assistant_tokens_mask``,
``return_assistant_tokens_mask``), and change no answer.

What both releases take and answer as if it were not there, whatever its value, is not refused: a
correct client may send it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollproof.fakes.http.request_body import BadRequest

__all__ = ["FIELDS", "RequestFields", "refuse_unanswered"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFields:
    """The fields of one request model. ``refused`` maps names to what the fake cannot do, ``idle``
    others to why they change nothing.
    """

    answered: frozenset[str]
    refused: Mapping[str, str]
    idle: Mapping[str, str]


def refuse_unanswered(body: Mapping[str, Any], fields: RequestFields) -> None:
    """Raise ``BadRequest`` where ``body`` asks for what the fake does not answer.

    What is null, false, 0 or empty asks for nothing, and neither does a list for a batch that has
    nothing else in it, nor a value that the server takes by itself.
    """
    for name in body.keys() & fields.refused.keys():
        value = body[name]
        if value and value != _OFF.get(name) and not _is_empty(value):
            raise BadRequest(
                f"{name} is not answered by rollproof's fake: {fields.refused[name]}.", param=name
            )


_OFF: Mapping[str, Any] = {"sampling_logprobs_mode": "selected", "beam_width": 1}
"""What a server takes where a request says nothing: a client that writes its defaults out asks for
no more than one that does not.
"""


def _is_empty(value: Any) -> bool:
    """Whether it is empty, or a list of such; a number in a list is a token."""
    return (
        value is None
        or value is False
        or value == ""
        or value == {}
        or (isinstance(value, list) and all(map(_is_empty, value)))
    )


_DRAWN = "what a call samples follows from its prompt, the weights and the seed alone"
_STOPS = "the coded policy ends by its own end-of-sequence token, and has no texts to stop at"
_ONE = "there is one engine, with one rank and one queue"
_LOGS = "it concerns the server's logs alone"
_TEXT = "words are tokens: nothing is a special token, and no template is rendered"
_TOOLS = "a text of the coded policy is never a tool call, nor reasoning"
_MEDIA = "the model takes text alone, and SGLang passes over media then"
_STREAM = "a stream has one event a token"

_SCORES = "it has the logprob of the sampled token alone"
_STATES = "it has no hidden states, masks or distributions"
_ENCODED = "it writes logprobs in the usual form alone"
_EMBEDDED = "a prompt is ids or words"
_ADAPTERS = (
    "it has no adapters beside the weights (a real server started without LoRA refuses it, too)"
)
_SESSIONS = "it keeps no sessions: send the whole prompt"
_BEAMS = "it samples one sequence, and searches none"
_FORCED = "it cannot be made to answer by a tool call"
_PROCESSOR = (
    "it runs no code of a client's (a real server does not either, unless it was started so)"
)


def _each(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


_BOOTSTRAP = _each(
    _ONE,
    *(
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "decode_tp_size",
        "routed_dp_rank",
        "data_parallel_rank",
    ),
    *(
        "disagg_prefill_dp_rank",
        "routing_key",
        "conversation_id",
        "session_id",
        "priority",
        "kv_hints",
        "http_worker_ipc",
        "encoder_urls",
    ),
)
_SGLANG_MEDIA = _each(
    _MEDIA,
    *(
        "image_data",
        "video_data",
        "audio_data",
        "mm_hashes",
        "mm_content_hashes",
        "use_audio_in_video",
        "video_config",
        "modalities",
    ),
    *(
        "need_wait_for_mm_inputs",
        "num_items_assigned",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "image_max_dynamic_patch",
    ),
    *("video_max_dynamic_patch", "images_config"),
)
_SGLANG_STOPS = _each(
    _STOPS,
    "stop",
    "stop_token_ids",
    "stop_regex",
    "no_stop_trim",
    "ignore_eos",
    "min_tokens",
    "min_new_tokens",
)
_SGLANG_DRAWN = _each(
    _DRAWN,
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
    ),
    *(
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "response_format",
        "sampling_seed",
        "seed",
        "custom_params",
    ),
)
_UNREAD = _each(
    "SGLang reads it nowhere, or only with a template of completions, which this server was not"
    " given",
    *("best_of", "suffix", "return_bytes", "return_entropy"),
)
_SGLANG_REFUSED = {
    **_each(
        _STATES,
        "return_hidden_states",
        "return_sampling_mask",
        "sampling_logprobs_mode",
        "return_indexer_topk",
    ),
    **_each(_ADAPTERS, "lora_path", "lora_id"),
    **_each(_SESSIONS, "session_params"),
    **_each(_PROCESSOR, "custom_logit_processor"),
}


def _within(reasons: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    return {name: reason for name, reason in reasons.items() if name in names}


def _model(
    names: str, answered: str, refused: Mapping[str, str], *idle: Mapping[str, str]
) -> RequestFields:
    """The model with these ``names``: of tables that several models share, the fields that it has."""
    every, taken = frozenset(names.split()), frozenset(answered.split())
    rest = every - taken
    turned_down = _within(refused, rest)
    return RequestFields(
        answered=taken,
        refused=turned_down,
        idle={
            name: table[name]
            for table in idle
            for name in _within(table, rest - turned_down.keys())
        },
    )


_GENERATE = """rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes use_audio_in_video
video_config sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask
sampling_logprobs_mode return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 stream log_metrics
return_hidden_states return_routed_experts routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id
custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size
routed_dp_rank data_parallel_rank disagg_prefill_dp_rank routing_key conversation_id http_worker_ipc background require_reasoning
max_thinking_tokens priority extra_key no_logs custom_labels return_bytes return_entropy return_prompt_token_ids external_trace_header
received_time need_wait_for_mm_inputs num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch image_max_dynamic_patch
video_max_dynamic_patch images_config multi_item_delimiter_indices token_indices_to_pool cache_salt kv_hints"""
_SGLANG_COMPLETION = """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
stream_options suffix temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details return_spec_tokens_details return_token_ids top_k min_p min_tokens json_schema regex ebnf
repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params
response_format custom_params custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt priority custom_labels"""
_SGLANG_CHAT = """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
response_format seed stop stream stream_options temperature top_p user tools tool_choice parallel_tool_calls return_hidden_states
return_routed_experts routed_experts_start_len return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids
return_token_ids return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode
reasoning_effort task top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
continue_final_message skip_special_tokens lora_path session_id session_params separate_reasoning stream_reasoning chat_template_kwargs
max_dynamic_patch min_dynamic_patch use_audio_in_video images_config video_config custom_logit_processor custom_params input_ids rid
extra_key cache_salt priority bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank"""
_SGLANG_SAMPLING = """max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
repetition_penalty min_new_tokens n beam_width json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed custom_params"""
_OPENAI_REFUSED = {
    **_SGLANG_REFUSED,
    **_each(
        "it counts neither tiers of a cache nor speculation",
        "return_cached_tokens_details",
        "return_spec_tokens_details",
    ),
    **_each(
        "ask for return_token_ids", "return_input_ids_in_sglext", "return_output_ids_in_sglext"
    ),
}
_OPENAI_IDLE = {
    **_UNREAD,
    **_each(_LOGS, "user", "custom_labels"),
    **_each(_TEXT, "skip_special_tokens", "continue_final_message", "chat_template_kwargs", "task"),
    **_each(
        _TOOLS,
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "separate_reasoning",
        "stream_reasoning",
    ),
}

_VLLM_SHARED_IDLE = {
    **_each(
        _DRAWN,
        *(
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "seed",
        ),
        *(
            "allowed_token_ids",
            "bad_words",
            "structured_outputs",
            "response_format",
            "length_penalty",
            "watermarking",
            "extra_args",
        ),
        *("vllm_xargs", "repetition_detection"),
    ),
    **_each(
        _STOPS, "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"
    ),
    **_each(_ONE, "priority", "session_id"),
    **_each(_STREAM, "stream_interval", "output_kind"),
    **_each(_LOGS, "user"),
    **_each(
        _TEXT,
        *(
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "add_special_tokens",
            "add_generation_prompt",
            "continue_final_message",
        ),
        *(
            "chat_template",
            "chat_template_kwargs",
            "documents",
            "detokenize",
            "output_text_buffer_length",
            "token_offsets",
            "truncation_side",
        ),
    ),
    **_each(
        _TOOLS,
        *(
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "reasoning_effort",
            "include_reasoning",
            "thinking_token_budget",
        ),
        *("reasoning_ended", "reasoning_parser_kwargs"),
    ),
    **_each("no media come with a request", "media_io_kwargs", "mm_processor_kwargs", "mm_payload"),
    **_each(
        "it is vLLM's own, and tells how its engine holds what it answers",
        "skip_clone",
        "flat_logprobs",
    ),
    **_each(
        "it is for vLLM's endpoints that render a request and do not run it",
        "return_token_offsets",
        "return_mm_kwargs",
    ),
    **_each(
        "an engine without a connector says so in its log, and goes on",
        "kv_transfer_params",
        "ec_transfer_params",
    ),
}
_VLLM_REFUSED = {
    **_each(_SCORES, "logprob_token_ids", "prompt_logprob_token_ids", "trace_decode_token_ids"),
    **_each(_ENCODED, "prompt_logprob_start"),
    **_each(_BEAMS, "use_beam_search"),
    **_each(
        "it writes what follows a prompt, not what stands between two (vLLM refuses it, too)",
        "suffix",
    ),
    **_each(_EMBEDDED, "prompt_embeds", "features", "content_parts"),
    **_each("it takes a prompt as it is: cut it yourself", "truncate_prompt_tokens"),
    **_each("it does not repeat a prompt as text", "return_prompt_text"),
    **_each("its prefix cache is read wherever it fits", "skip_reading_prefix_cache"),
}
_VLLM_COMPLETION = """model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
suffix temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
allowed_token_ids prompt_logprobs logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets mm_payload
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval"""
_VLLM_CHAT = """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
response_format seed stop stream stream_options temperature top_p tools tool_choice reasoning_effort thinking_token_budget
include_reasoning parallel_tool_calls user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens
documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text mm_payload
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval"""
_VLLM_GENERATE = """request_id token_ids token_offsets features content_parts sampling_params model reasoning_ended reasoning_parser_kwargs
return_token_ids output_mode stream stream_options cache_salt priority kv_transfer_params ec_transfer_params"""
_VLLM_SAMPLING = """n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprob_token_ids
flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval
skip_clone output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache
thinking_token_budget repetition_detection routed_experts_prompt_start trace_decode_token_ids"""

FIELDS: Mapping[str, RequestFields] = {
    "sglang /generate": _model(
        _GENERATE,
        "rid text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num"
        " stream return_routed_experts routed_experts_start_len extra_key cache_salt",
        {
            **_SGLANG_REFUSED,
            **_each(_SCORES, "token_ids_logprob"),
            **_each(
                _ENCODED,
                "return_text_in_logprobs",
                "return_flat_raw_top_logprobs",
                "return_flat_raw_top_logprobs_b64",
            ),
            **_each(_EMBEDDED, "input_embeds", "positional_embed_overrides"),
            **_each("the client has them", "return_prompt_token_ids"),
            **_each("it scores no items", "multi_item_delimiter_indices", "token_indices_to_pool"),
        },
        _UNREAD,
        _BOOTSTRAP,
        _SGLANG_MEDIA,
        _each(
            _LOGS,
            "log_metrics",
            "no_logs",
            "custom_labels",
            "external_trace_header",
            "received_time",
            "background",
        ),
        _each(_TOOLS, "require_reasoning", "max_thinking_tokens"),
    ),
    "sglang sampling_params": _model(
        _SGLANG_SAMPLING,
        "max_new_tokens n",
        _each(_BEAMS, "beam_width"),
        _SGLANG_STOPS,
        _SGLANG_DRAWN,
        _each(_TEXT, "skip_special_tokens", "spaces_between_special_tokens"),
        _each(_STREAM, "stream_interval"),
    ),
    "sglang /v1/completions": _model(
        _SGLANG_COMPLETION,
        "model prompt echo logprobs max_tokens n stream stream_options return_routed_experts"
        " routed_experts_start_len return_token_ids rid extra_key cache_salt",
        _OPENAI_REFUSED,
        _OPENAI_IDLE,
        _BOOTSTRAP,
        _SGLANG_MEDIA,
        _SGLANG_STOPS,
        _SGLANG_DRAWN,
    ),
    "sglang /v1/chat/completions": _model(
        _SGLANG_CHAT,
        "messages model logprobs top_logprobs max_tokens max_completion_tokens n stream"
        " stream_options return_routed_experts routed_experts_start_len return_prompt_token_ids"
        " return_token_ids return_meta_info input_ids rid extra_key cache_salt",
        _OPENAI_REFUSED,
        _OPENAI_IDLE,
        _BOOTSTRAP,
        _SGLANG_MEDIA,
        _SGLANG_STOPS,
        _SGLANG_DRAWN,
    ),
    "vllm /v1/completions": _model(
        _VLLM_COMPLETION,
        "model prompt echo logprobs max_tokens n stream stream_options prompt_logprobs request_id"
        " return_tokens_as_token_ids return_token_ids routed_experts_prompt_start cache_salt",
        _VLLM_REFUSED,
        _VLLM_SHARED_IDLE,
    ),
    "vllm /v1/chat/completions": _model(
        _VLLM_CHAT,
        "messages model logprobs top_logprobs max_tokens max_completion_tokens n stream"
        " stream_options prompt_logprobs request_id return_tokens_as_token_ids return_token_ids"
        " routed_experts_prompt_start cache_salt",
        {**_VLLM_REFUSED, **_each("it does not repeat a message", "echo")},
        _VLLM_SHARED_IDLE,
    ),
    "vllm /inference/v1/generate": _model(
        _VLLM_GENERATE,
        "request_id token_ids sampling_params model return_token_ids output_mode stream"
        " stream_options cache_salt",
        _VLLM_REFUSED,
        _VLLM_SHARED_IDLE,
    ),
    "vllm sampling_params": _model(
        _VLLM_SAMPLING,
        "n max_tokens logprobs prompt_logprobs routed_experts_prompt_start",
        _VLLM_REFUSED,
        _VLLM_SHARED_IDLE,
    ),
}
"""By face and endpoint."""
