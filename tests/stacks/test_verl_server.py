"""verl's server conventions, without verl: a stand-in takes the place of its ``TokenOutput``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rollproof.core.case import Case, Model
from rollproof.core.contract import PartialOff, Provenance, Rows, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import EngineOutput, FinishReason, Request
from rollproof.core.trace import Recorder
from rollproof.fakes.engine.fleet import Fleet
from rollproof.simulation import virtual_loop
from rollproof.stacks._support.tokenizer import PAD_ID, IdTokenizer, spell
from rollproof.stacks.verl.configuration import lengths_of, verl_contract
from rollproof.stacks.verl.release import VERSIONS, RouteArray
from rollproof.stacks.verl.rollout_servers import (
    CONVENTIONS,
    Lengths,
    VerlServer,
    finish_reason_of,
    servers_of,
    token_output_fields,
)
from rollproof.stacks.verl.tool_dialogue import IdTool, parser_of
from rollproof.stacks.verl.upstream import Verl


def _output(
    *ids: int, reason: FinishReason = FinishReason.STOP, routes: bool = True
) -> EngineOutput:
    rows = np.ones((len(ids) + 1, 2, 2), dtype=np.uint8)
    return EngineOutput(
        token_ids=ids,
        logprobs=np.full(len(ids), -0.5),
        routes=rows if routes else None,
        finish_reason=reason,
        cached_tokens=3,
    )


def _verl(version: str) -> Verl:
    unused: dict[str, Any] = dict.fromkeys(
        (
            "client",
            "balancer",
            "tool_agent_loop",
            "single_turn_agent_loop",
            "agent_loop",
            "tool_parser",
            "function_call",
            "tool_response",
            "checkpoint",
        )
    )
    return Verl(version=version, facts=VERSIONS[version], token_output=SimpleNamespace, **unused)


@pytest.mark.parametrize(
    ("flavour", "reason", "spelled"),
    [
        ("vllm", FinishReason.ABORT, "aborted"),
        ("vllm", FinishReason.STOP, "completed"),
        ("vllm", FinishReason.LENGTH, "completed"),
        ("sglang", FinishReason.ABORT, "abort"),
        ("sglang", FinishReason.STOP, "stop"),
        ("sglang", FinishReason.LENGTH, "length"),
    ],
)
def test_stop_reasons_are_spelled_as_each_server_does(
    flavour: str, reason: FinishReason, spelled: str
) -> None:
    """One server folds stop and length into ``completed`` (vLLM), the other hands its engine's word
    through (SGLang).
    """
    fields = token_output_fields(
        _output(5, reason=reason),
        CONVENTIONS[flavour],
        VERSIONS["0.9.1"],
        tag=4,
        want_logprobs=True,
    )
    assert spelled == fields["stop_reason"]
    back = finish_reason_of(spelled)
    assert back in (reason, FinishReason.COMPLETED)


def test_a_word_that_no_server_says_is_an_error_and_silence_is_unknown() -> None:
    """Unknown stop reasons are not guessed."""
    assert FinishReason.ERROR is finish_reason_of("tired")
    assert None is finish_reason_of(None)


def test_an_answer_carries_its_tag_tokens_logprobs_and_routes() -> None:
    """The plain case, on the newest release."""
    fields = token_output_fields(
        _output(5, 6), CONVENTIONS["vllm"], VERSIONS["0.9.1"], tag=4, want_logprobs=True
    )
    assert [5, 6] == fields["token_ids"]
    assert [-0.5, -0.5] == fields["log_probs"]
    assert (3, 2, 2) == fields["routed_experts"].shape
    assert {"global_steps": 4, "num_cached_tokens": 3} == fields["extra_fields"]


def test_an_abort_without_tokens_is_bare_on_vllm_and_keeps_its_routes_on_sglang() -> None:
    """The one returns early with nothing, until 0.8.0 not even its tag; the other keeps routes and
    an empty list of logprobs.
    """
    empty = _output(reason=FinishReason.ABORT)
    vllm = token_output_fields(
        empty, CONVENTIONS["vllm"], VERSIONS["0.9.1"], tag=4, want_logprobs=True
    )
    assert (None, None, {"global_steps": 4}) == (
        vllm["log_probs"],
        vllm["routed_experts"],
        vllm["extra_fields"],
    )
    assert (
        {}
        == token_output_fields(
            empty, CONVENTIONS["vllm"], VERSIONS["0.8.0"], tag=4, want_logprobs=True
        )["extra_fields"]
    )
    sglang = token_output_fields(
        empty, CONVENTIONS["sglang"], VERSIONS["0.9.1"], tag=4, want_logprobs=True
    )
    assert ([], {"global_steps": 4}) == (sglang["log_probs"], sglang["extra_fields"])
    assert sglang["routed_experts"] is not None


def test_logprobs_that_nobody_asked_for_are_none() -> None:
    """Without the wish there is no list."""
    assert (
        None
        is token_output_fields(
            _output(5), CONVENTIONS["sglang"], VERSIONS["0.9.1"], tag=4, want_logprobs=False
        )["log_probs"]
    )


def test_sglang_routes_are_tensors_where_the_release_says_so() -> None:
    """Until 0.8.0 the SGLang server handed over the engine's tensors; vLLM's never did."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    assert RouteArray.TENSOR is VERSIONS["0.8.0"].sglang_routes
    fields = token_output_fields(
        _output(5), CONVENTIONS["sglang"], VERSIONS["0.8.0"], tag=4, want_logprobs=True
    )
    assert isinstance(fields["routed_experts"], torch.Tensor)
    fields = token_output_fields(
        _output(5), CONVENTIONS["vllm"], VERSIONS["0.8.0"], tag=4, want_logprobs=True
    )
    assert isinstance(fields["routed_experts"], np.ndarray)


@pytest.mark.parametrize(
    ("stated", "sent", "least", "granted"),
    [
        (5, 10, 1, 5),
        (None, 4, 1, 8),
        (None, 10, 1, 2),
        (None, 12, 1, 1),
        (None, 12, 0, 0),
        (100, 10, 1, 30),
        (0, 4, 1, 1),
        (0, 4, 0, 0),
    ],
)
def test_a_server_grants_what_is_stated_or_its_default_within_its_bounds(
    stated: int | None, sent: int, least: int, granted: int
) -> None:
    """Default: ``min(response, prompt + response - sent)``; then at least ``least`` and at most
    what the model has room for.
    """
    assert granted == Lengths(prompt=4, response=8, model=40).budget(stated, sent, least)


def _case(**changes: Any) -> Case:
    request = Request(request_id="r0", prompt_ids=(11, 12), max_tokens=4, turns=((7, 8, 9),))
    return Case(**{"flavour": "vllm", "requests": (request,), "model": Model(), **changes})


def test_the_configured_prompt_has_room_for_what_a_tool_answers() -> None:
    """Agent loops of 0.8.0 cut tool answers to the prompt length: it is that of the longest prompt
    or answer.
    """
    lengths = lengths_of(_case(), 6)
    assert (3, 6) == (lengths.prompt, lengths.response)
    assert lengths.model >= 2 + 3 + 6


def test_a_server_runs_its_engine_and_tags_with_the_last_step_that_was_published() -> None:
    """Tokens of weights that came without a step carry the step before: verl's adapters leave the
    old one in place.
    """
    fleet, outputs = _served(unlabelled=True)
    assert [0, 0] == [output.extra_fields["global_steps"] for output in outputs]
    assert [0, 1] == [
        reply.true_tokens[0].version
        for reply in fleet.recorder.events
        if getattr(reply, "true_tokens", None)
    ]
    _, outputs = _served(unlabelled=False)
    assert [0, 1] == [output.extra_fields["global_steps"] for output in outputs]


def _served(*, unlabelled: bool) -> tuple[Fleet, list[Any]]:
    fleets: list[Fleet] = []

    async def main() -> list[Any]:
        fleet = Fleet(_case(), Recorder(clock_time))
        fleets.append(fleet)
        server = servers_of(fleet, _verl("0.9.1"), lambda: Lengths(prompt=4, response=8, model=40))[
            "s0"
        ]
        first = await _generate(server)
        server.note_steps()
        await fleet.sync(None if unlabelled else fleet.train(), mode=PauseMode.ABORT)
        return [first, await _generate(server)]

    def clock_time() -> float:
        return 0.0

    outputs = virtual_loop.run(main)
    return fleets[0], outputs


async def _generate(server: VerlServer) -> Any:
    params = {"max_tokens": 2, "logprobs": True, "temperature": 1.0}
    output = await server.generate(prompt_ids=[11, 12], sampling_params=params, request_id="random")
    assert {
        "max_tokens": 2,
        "logprobs": True,
        "temperature": 1.0,
    } == params, "Ray hands an actor a copy"
    return output


def test_the_client_contract_is_as_sampled_min_max_and_surfaces_aborts_when_partial_is_off() -> (
    None
):
    """What verl documents of its client, on the sizes and dtype of the fleet."""

    async def main() -> list[Any]:
        return [
            verl_contract(Fleet(_case(partial=partial), Recorder(lambda: 0.0)))
            for partial in (True, False)
        ]

    on, off = virtual_loop.run(main)
    assert (Rows.FORWARDED, Versions.MIN_MAX, Provenance.AS_SAMPLED, "uint8") == (
        on.rows,
        on.versions,
        on.provenance,
        on.dtype,
    )
    assert [False, True] == [on.abort_surfaces, off.abort_surfaces]
    assert PartialOff.SURFACED is off.partial_off


def test_ids_go_to_text_and_back() -> None:
    """Templates add nothing: the prompt that a loop sends is the one that the case asked for."""
    tokenizer = IdTokenizer([(7, 8)])
    messages = [
        {"role": "user", "content": spell([1, 22])},
        {"role": "tool", "content": spell([7])},
        {"role": "assistant", "content": None},
    ]
    assert [1, 22, 7] == tokenizer.apply_chat_template(messages, tokenize=True)
    assert [1, 22] == tokenizer.encode(tokenizer.decode([1, 22]))


def test_padding_is_that_of_transformers() -> None:
    """Prompts are padded on the left, responses on the right, with a pad id that cannot pass for a
    mask. One sequence is one row, a tensor only on request, and a sequence of no tokens stays an
    empty list even then.
    """
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    tokenizer = IdTokenizer()
    tokenizer.padding_side = "left"
    left = tokenizer.pad({"input_ids": [5]}, max_length=3, return_attention_mask=True)
    assert {"input_ids": [PAD_ID, PAD_ID, 5], "attention_mask": [0, 0, 1]} == left
    tokenizer.padding_side = "right"
    right = tokenizer.pad(
        {"input_ids": [5]}, max_length=3, return_attention_mask=False, return_tensors="pt"
    )
    assert [5, PAD_ID, PAD_ID] == right["input_ids"].tolist()
    assert {"input_ids": [], "attention_mask": []} == tokenizer.pad(
        {"input_ids": []}, max_length=3, return_attention_mask=True, return_tensors="pt"
    )


def test_a_tool_is_called_after_turns_that_end_by_themselves_while_answers_are_left() -> None:
    """A turn that was cut off holds no whole call; each call takes the next answer."""

    class Base:
        known: ClassVar[dict[str, Any]] = {}

        def __init__(self, tokenizer: IdTokenizer) -> None:
            self.tokenizer = tokenizer

        @classmethod
        def register(cls, name: str) -> Any:
            return lambda parser: cls.known.setdefault(name, parser)

    tokenizer = IdTokenizer([(7, 8)], eos_token_id=9)
    parser = parser_of(Base, lambda **fields: fields, "ids")(tokenizer)
    tool = IdTool(tokenizer, lambda text: text)

    async def main() -> list[Any]:
        cut = await parser.extract_tool_calls([5])
        whole = await parser.extract_tool_calls([5, 9])
        answer = await tool.execute("", {})
        return [cut, whole, answer[0], await parser.extract_tool_calls([9])]

    cut, whole, answer, later = virtual_loop.run(main)
    assert ("5", []) == cut
    assert [{"name": tool.name, "arguments": "{}"}] == whole[1]
    assert "7 8" == answer
    assert ("9", []) == later
