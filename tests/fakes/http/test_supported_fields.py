"""Fields of requests: each of the real servers' models is answered, refused, or known to change
nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollproof.fakes.http
from rollproof.fakes.http.supported_fields import ANSWERED, IGNORED, REFUSED
from tests.fakes.http.served import Served, served

MODELS = {
    "sglang /generate": ("srt/managers/io_struct.py", "GenerateReqInput"),
    "sglang sampling_params": ("srt/sampling/sampling_params.py", "SamplingParams"),
    "sglang /v1/completions": ("srt/entrypoints/openai/protocol.py", "CompletionRequest"),
    "sglang /v1/chat/completions": ("srt/entrypoints/openai/protocol.py", "ChatCompletionRequest"),
    "vllm /v1/completions": ("entrypoints/openai/completion/protocol.py", "CompletionRequest"),
    "vllm /v1/chat/completions": (
        "entrypoints/openai/chat_completion/protocol.py",
        "ChatCompletionRequest",
    ),
    "vllm /inference/v1/generate": (
        "entrypoints/scale_out/token_in_token_out/protocol.py",
        "GenerateRequest",
    ),
    "vllm sampling_params": ("sampling_params.py", "SamplingParams"),
}
"""Where the real servers' models are, below the package."""
DERIVED = {
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
    "ebnf_full_assistant",
}
"""Of SGLang's sampling parameters: what it writes there itself."""
BASE: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Served]]:
    with served("sglang") as sglang, served("vllm") as vllm:
        yield {"sglang": sglang, "vllm": vllm}


def _answer_to(servers: dict[str, Served], model: str, values: dict[str, Any]) -> Any:
    """The answer to a request with these fields of ``model``."""
    server, target_model = model.split()
    path = (
        target_model
        if target_model in BASE
        else {"sglang": "/generate", "vllm": "/inference/v1/generate"}[server]
    )
    body = dict(BASE[path])
    body = (
        {**body, **values}
        if target_model in BASE
        else {**body, "sampling_params": {**body["sampling_params"], **values}}
    )
    return servers[server].client.post(path, json=body)


@pytest.mark.parametrize("model", list(MODELS))
def test_every_field_of_the_real_model_is_in_one_table(model: str) -> None:
    """Nothing is accepted in silence: what the installed server knows is answered, refused, or said
    to change nothing.
    """
    package = model.split()[0]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: its request models cannot be read")
    file, name = MODELS[model]
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    (made,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    )
    real = {
        item.target.id
        for item in made.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    names = {name for name in real if not name.startswith("_")} - DERIVED
    assert set() == names - (ANSWERED[model] | IGNORED[package] | REFUSED[package])


@pytest.mark.parametrize("model", list(ANSWERED))
def test_no_field_is_in_two_lists(model: str) -> None:
    """A field is answered or ignored, and refused only where it is neither."""
    server = model.partition(" ")[0]

    assert set() == IGNORED[server] & (ANSWERED[model] | REFUSED[server])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (model, name)
        for model, answered in ANSWERED.items()
        for name in sorted(REFUSED[model.partition(" ")[0]] - answered)
        # SGLang answers 500 to any name that its sampling parameters do not have
        if model != "sglang sampling_params" or name == "beam_width"
    ],
)
def test_unsupported_fields_are_refused(servers: dict[str, Served], model: str, name: str) -> None:
    """400 with the field's name; a field that is off requests nothing."""
    refusal = _answer_to(servers, model, {name: "x"})

    assert 400 == refusal.status_code
    assert f"{name} is not supported by rollproof's fake server: leave it out." in refusal.text
    if model == "sglang sampling_params":
        return
    assert {200} == {_answer_to(servers, model, {name: off}).status_code for off in (None, False)}


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("sglang /generate", {"return_bytes": True, "return_entropy": True}),
        ("sglang /v1/completions", {"best_of": 1, "suffix": "w7"}),
        ("vllm /v1/completions", {"return_token_offsets": True, "return_mm_kwargs": True}),
        ("vllm /v1/chat/completions", {"return_token_offsets": True, "return_mm_kwargs": True}),
        ("vllm sampling_params", {"flat_logprobs": True}),
        *(
            (
                f"vllm {path}",
                {"kv_transfer_params": {"do_remote_decode": True}, "ec_transfer_params": {"x": 1}},
            )
            for path in BASE
            if path[1] != "g"
        ),
    ],
)
def test_fields_that_the_real_servers_ignore_are_accepted(
    servers: dict[str, Served], model: str, values: dict[str, Any]
) -> None:
    """Their code was read: nothing of it reaches an answer of a server that was started plainly.
    The answer is as without it.
    """
    varying = {"id", "request_id", "created", "meta_info"}
    answers = [_answer_to(servers, model, fields) for fields in ({}, values)]

    assert [200, 200] == [answer.status_code for answer in answers]
    without, with_it = (
        {name: value for name, value in answer.json().items() if name not in varying}
        for answer in answers
    )
    assert without.pop("usage", None) == with_it.pop("usage", None)
    assert without == with_it


def test_a_chat_with_a_prompt_next_to_its_messages_is_refused(
    servers: dict[str, Served],
) -> None:
    """Release 0.32 takes the ids in place of the messages; to answer the messages would be wrong in
    silence.
    """
    refusal = _answer_to(
        servers, "vllm /v1/chat/completions", {"kv_transfer_params": {"prompt_token_ids": [5, 6]}}
    )

    assert 400 == refusal.status_code
    assert (
        "kv_transfer_params.prompt_token_ids is not supported by rollproof's fake" in refusal.text
    )


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("sglang /generate", {"sampling_logprobs_mode": "selected"}),
        (
            "sglang /generate",
            {
                "input_ids": [[5, 6], [5, 7]],
                "lora_path": ["", ""],
                "token_ids_logprob": [[], []],
                "custom_logit_processor": [None, None],
            },
        ),
        ("sglang sampling_params", {"beam_width": 1}),
        (
            "sglang /v1/chat/completions",
            {"sampling_logprobs_mode": "selected", "session_params": {}},
        ),
        ("vllm sampling_params", {"prompt_logprob_token_ids": [[], []]}),
    ],
)
def test_defaults_that_a_client_writes_out_request_nothing(
    servers: dict[str, Served], model: str, values: dict[str, Any]
) -> None:
    """Nor do lists for a batch in which no prompt has any; a token of id 0 is one."""
    assert 200 == _answer_to(servers, model, values).status_code
    assert (
        400 == _answer_to(servers, "sglang /generate", {"token_ids_logprob": [[0], []]}).status_code
    )
    assert (
        400 == _answer_to(servers, "vllm sampling_params", {"logprob_token_ids": [0]}).status_code
    )


def _nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(
            ("sglang sampling_params", name)
            for name in ("stop", "json_schema", "regex", "stream_interval", "custom_params")
        ),
        ("sglang /generate", "rid"),
        ("sglang /v1/chat/completions", "messages"),
        ("vllm sampling_params", "logprobs"),
        ("vllm /v1/completions", "logprobs"),
        ("vllm /v1/chat/completions", "response_format"),
    ],
)
def test_a_body_nested_too_deep_is_refused(
    servers: dict[str, Served], model: str, name: str, stream: bool
) -> None:
    """As a body that cannot be read, whichever field holds it: it can be shown neither in an error
    nor in a trace.
    """
    server, target_model = model.split()
    path = (
        target_model
        if target_model in BASE
        else {"sglang": "/generate", "vllm": "/inference/v1/generate"}[server]
    )
    deep = (
        {name: _nested(900)}
        if target_model in BASE
        else {"sampling_params": {**BASE[path]["sampling_params"], name: _nested(900)}}
    )
    refusal = servers[server].client.post(path, json={**BASE[path], **deep, "stream": stream})

    assert 400 == refusal.status_code
    assert "The body is nested more than 200 deep." in refusal.text


@pytest.mark.parametrize(
    "content", [3, True, {"a": 1}, [3], [[]], [{"type": []}], [{"type": {"a": 1}}]]
)
def test_invalid_message_contents_are_refused_by_vllm(
    servers: dict[str, Served], content: Any
) -> None:
    """Neither an error of the server's, nor a prompt made of what Python writes for it."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    refusal = servers["vllm"].client.post("/v1/chat/completions", json=body)

    assert 400 == refusal.status_code
    assert "content must be text, or a list of parts" in refusal.text
    plain = servers["vllm"].client.post(
        "/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": ["w5"]}]}
    )
    assert 1 == plain.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("content", [3, True, {"a": 1}])
def test_invalid_message_contents_are_refused_by_sglang(
    servers: dict[str, Served], content: Any
) -> None:
    """A prompt was made of what Python writes for it."""
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    refusal = servers["sglang"].client.post("/v1/chat/completions", json=body)

    assert 400 == refusal.status_code
    assert "content must be text, or a list of parts" in refusal.text


def test_many_lists_at_one_level_are_not_deep(servers: dict[str, Served]) -> None:
    """A large batch has as many brackets, and a schema is nested, too."""
    body = {
        "input_ids": [[5, 6]] * 500,
        "sampling_params": {"max_new_tokens": 1, "json_schema": "[" * 500},
    }

    assert 500 == len(servers["sglang"].client.post("/generate", json=body).json())
    assert (
        200
        == _answer_to(
            servers, "sglang sampling_params", {"custom_params": _nested(150)}
        ).status_code
    )


def test_answered_fields_are_read() -> None:
    """Each answered name occurs in the code of its server: a list alone answers nothing."""
    folder = Path(str(rollproof.fakes.http.__file__)).parent
    code = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.py")
        if path.name != "supported_fields.py"
    }
    unread = [
        f"{model}: {name}"
        for model, answered in ANSWERED.items()
        for name in answered
        if not any(
            f'"{name}"' in text
            for file, text in code.items()
            if model.split()[0] in file or file == "sampling_validation.py"
        )
    ]

    assert [] == unread


def test_a_stream_echoes_its_prompt_as_vllm_does(servers: dict[str, Served]) -> None:
    """The first event of a choice begins with the prompt, its logprobs and its ids; the texts join
    to that of a whole reply.
    """
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "echo": True, "logprobs": 1}
    client = servers["vllm"].client
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    streamed = client.post("/v1/completions", json={**body, "stream": True}).text
    events = [json.loads(line) for line in re.findall(r"data: (\{.*\})", streamed)]
    choices = [event["choices"][0] for event in events]

    assert whole["text"] == "".join(choice["text"] for choice in choices)
    assert whole["text"].startswith("w5 w6 w7 ")
    assert [[5, 6, 7], None, None] == [choice["prompt_token_ids"] for choice in choices]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert whole["logprobs"][name] == [
            value for choice in choices for value in choice["logprobs"][name]
        ]
    assert None is whole["logprobs"]["token_logprobs"][0]


def test_a_stream_of_an_echo_alone_has_the_prompt_alone(servers: dict[str, Served]) -> None:
    """With max_tokens 0; and where ids are returned, the prompt is not repeated as text."""
    client = servers["vllm"].client

    def first(**more: Any) -> Any:
        text = client.post(
            "/v1/completions", json={"prompt": [5, 6], "echo": True, "stream": True, **more}
        ).text
        return json.loads(re.findall(r"data: (\{.*\})", text)[0])["choices"][0]

    assert ("w5 w6", [5, 6], "length") == tuple(
        first(max_tokens=0)[name] for name in ("text", "prompt_token_ids", "finish_reason")
    )
    with_ids = first(max_tokens=1, return_token_ids=True)
    assert [5, 6] == with_ids["prompt_token_ids"]
    assert f"w{with_ids['token_ids'][0]}" == with_ids["text"]


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_a_list_of_keys_holds_texts(servers: dict[str, Served], name: str) -> None:
    """An empty text is none; null is refused, as SGLang does. null for the whole list, and for a
    single prompt, is none.
    """

    def status(prompts: Any, value: Any) -> tuple[int, str]:
        answer = servers["sglang"].client.post(
            "/generate", json={**BASE["/generate"], "input_ids": prompts, name: value}
        )
        return answer.status_code, answer.text if answer.status_code != 200 else ""

    assert (
        (200, "") == status([[5], [6]], ["a", ""]) == status([[5], [6]], None) == status([5], None)
    )
    refused, text = status([[5], [6]], ["a", None])
    assert (400, True) == (refused, f"Every {name} should be a string." in text)


def test_a_chat_with_images_is_refused_by_vllm(servers: dict[str, Served]) -> None:
    """The model takes text alone: parts of other kinds are not dropped in silence."""
    parts = [{"type": "text", "text": "w5"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    answer = servers["vllm"].client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": parts}], "max_tokens": 1},
    )

    assert 400 == answer.status_code
    assert "The model takes text alone" in answer.text


def test_the_best_of_a_chat_are_the_sampled_ones(servers: dict[str, Served]) -> None:
    """SGLang's top_logprobs: the fake has one."""
    body = {**BASE["/v1/chat/completions"], "logprobs": True, "top_logprobs": 2}
    content = (
        servers["sglang"]
        .client.post("/v1/chat/completions", json=body)
        .json()["choices"][0]["logprobs"]["content"]
    )

    assert [[entry["token"]] for entry in content] == [
        [top["token"] for top in entry["top_logprobs"]] for entry in content
    ]
