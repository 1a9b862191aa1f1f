"""SGLang's replies as records, and its stand-ins where SGLang is not installed."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import Model
from rollproof.core.contract import Contract, KvPolicy, Logprobs
from rollproof.core.engine_contract import StreamMode
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.records import FinishReason, Span
from rollproof.engines.sglang.sglang_cpu import VERSIONS, StandInError, install
from rollproof.engines.sglang.sglang_engine import SglangEngine
from rollproof.engines.sglang.sglang_replies import joined, output_of, piece_of, routes_of
from rollproof.errors import EngineStartError, SubjectError, UsageError
from rollproof.fakes.engine.flavours import engine_contract, flavour_named

MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2)


def contract(name: str = "sglang") -> Contract:
    return engine_contract(flavour_named(name), MODEL, KvPolicy.RECOMPUTE)


def reply(rows: int = 5, dtype: str = "int32", **meta: Any) -> dict[str, Any]:
    """A reply to four tokens of prompt, as SGLang 0.5.21 gives it."""
    routes = np.arange(rows * 6, dtype=dtype) % 8
    return {
        "output_ids": [7, 9],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 4,
            "weight_version": "w1",
            "num_retractions": 0,
            "output_token_logprobs": [[-0.5, 7, None], [-1.25, 9, None]],
            "completion_tokens": 2,
            "cached_tokens": 3,
            "weight_versions": [
                {"version": "w0", "start": 0, "end": 1},
                {"version": "w1", "start": 1, "end": 2},
            ],
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
            **meta,
        },
    }


def test_a_finished_reply() -> None:
    """Tokens, logprobs, routes of the declared layers, spans and the label are read as SGLang
    showed them.
    """
    output = output_of(reply(), contract())
    assert ((7, 9), FinishReason.LENGTH, "length", 3, "w1") == (
        output.token_ids,
        output.finish_reason,
        output.native,
        output.cached_tokens,
        output.version,
    )
    assert (Span(start=0, end=1, version="w0"), Span(start=1, end=2, version="w1")) == output.spans
    assert output.logprobs is not None and output.routes is not None
    assert [-0.5, -1.25] == output.logprobs.tolist()
    assert ((5, 3, 2), "int32", False) == (
        output.routes.shape,
        output.routes.dtype.name,
        output.routes.flags.writeable,
    )


def test_the_dtype_that_a_reply_names_is_used() -> None:
    """Newer servers send narrower integers and say so: read as int32 they would be other experts,
    and fewer rows.
    """
    routes = routes_of(
        reply(rows=4, dtype="uint8", routed_experts_dtype="uint8")["meta_info"], contract()
    )
    assert routes is not None
    assert ((4, 3, 2), "uint8", [0, 1]) == (routes.shape, routes.dtype.name, routes[0, 0].tolist())


def test_an_abort_in_the_queue() -> None:
    """It has neither routes nor counts of tokens; empty logprobs and an empty span stay."""
    queued = {
        "output_ids": [],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "w0",
            "output_token_logprobs": [],
            "completion_tokens": 0,
            "weight_versions": [{"version": "w0", "start": 0, "end": 0}],
        },
    }
    output = output_of(queued, contract())
    assert (FinishReason.ABORT, "Abort in waiting queue", None, None) == (
        output.finish_reason,
        output.message,
        output.routes,
        output.cached_tokens,
    )
    assert output.logprobs is not None and output.logprobs.shape == (0,)
    assert (Span(start=0, end=0, version="w0"),) == output.spans


def test_a_logprob_of_another_token_is_missing() -> None:
    """An entry names its token; a number of another token is no logprob of the returned one."""
    output = output_of(reply(output_token_logprobs=[[-0.5, 7, None], [-1.25, 8, None]]), contract())
    assert output.logprobs is not None
    np.testing.assert_array_equal([-0.5, np.nan], output.logprobs)


def test_a_chunk() -> None:
    """A chunk repeats all tokens so far; routes come with the last one."""
    chunk = reply(finish_reason=None, routed_experts=None)
    assert (2, None, False) == (
        (piece := piece_of(chunk, contract())).sampled,
        piece.rows,
        piece.finished,
    )
    assert (5, True, 1) == (
        (last := piece_of({**reply(), "index": 1}, contract())).rows,
        last.finished,
        last.sample,
    )


def test_chunks_that_hold_what_is_new_make_the_whole_reply() -> None:
    """Tokens and their logprobs of every chunk stand in order; routes and spans are the last
    chunk's.
    """
    chunks = [
        {
            **reply(
                finish_reason=None,
                routed_experts=None,
                output_token_logprobs=[[-0.5, 7, None]],
                completion_tokens=1,
            ),
            "output_ids": [7],
        },
        {**reply(output_token_logprobs=[[-1.25, 9, None]]), "output_ids": [9]},
    ]
    output = output_of(joined(chunks), contract())
    whole = output_of(reply(), contract())
    assert (whole.token_ids, whole.spans) == (output.token_ids, output.spans)
    assert output.logprobs is not None and output.routes is not None
    assert [-0.5, -1.25] == output.logprobs.tolist()
    assert (5, 3, 2) == output.routes.shape
    late = {**reply(output_token_logprobs=[]), "output_ids": []}
    assert (7, 9) == output_of(
        joined(
            [
                *[{**one, "output_ids": ids} for one, ids in zip(chunks, ([7], [9]), strict=True)],
                late,
            ]
        ),
        contract(),
    ).token_ids


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"output_ids": [1]}, "not a finished reply of SGLang"),
        (reply(finish_reason=None), "not a finished reply of SGLang"),
        (reply(finish_reason={"type": "exploded"}), "not a finished reply of SGLang"),
        (reply(routed_experts="AAAA"), "are not complete rows of 3 layers and 2 experts"),
        (reply(routed_experts="not base64!"), "are not complete rows of 3 layers and 2 experts"),
        (reply(routed_experts_dtype="int7"), "are not complete rows of 3 layers and 2 experts"),
    ],
)
def test_foreign_replies(bad: dict[str, Any], message: str) -> None:
    """What is no reply of SGLang, or does not fit the model, is refused with a reason."""
    with pytest.raises(SubjectError, match=message):
        output_of(bad, contract())


def test_the_stand_ins_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SGLang, on another release or machine, nothing is replaced and the text says what to
    do.
    """

    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    with pytest.raises(
        StandInError,
        match=(
            rf"SGLang is not installed(.|\n)*needs sglang=={VERSIONS[-1]}: `nox -s engines`"
            r" installs it"
        ),
    ):
        install()
    monkeypatch.setattr(metadata, "version", lambda name: "0.4.9")
    with pytest.raises(
        StandInError,
        match=(
            rf"were tested on {VERSIONS[0]}(.|\n)*and 0.4.9 is installed(.|\n)*Install"
            rf" sglang=={VERSIONS[-1]}"
        ),
    ):
        install()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(
        StandInError,
        match=r"SGLang's CPU engine supports the machines x86_64(.|\n)*this one is 'riscv64'",
    ):
        install()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder whose config is that of a small mixture of experts."""
    config = {
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_options_of_the_adapter_are_declared(checkpoint: Path) -> None:
    """Parts of a stream and unscaled logprobs are conventions of the contract; what does not exist
    is refused.
    """
    plain = SglangEngine(EngineSettings(model=checkpoint)).contract
    other = SglangEngine(
        EngineSettings(
            model=checkpoint, logprobs_mode="raw", extra={"incremental_streaming_output": True}
        )
    ).contract
    assert plain.engine is not None and other.engine is not None
    assert (Logprobs.TEMPERATURE_SCALED, (StreamMode.FINAL, StreamMode.CUMULATIVE)) == (
        plain.logprobs,
        plain.engine.stream_modes,
    )
    assert (Logprobs.RAW, (StreamMode.FINAL, StreamMode.DELTA)) == (
        other.logprobs,
        other.engine.stream_modes,
    )
    with pytest.raises(
        UsageError,
        match=r"SGLang has the logprobs \['raw', 'temperature-scaled'\], not 'processed'",
    ):
        SglangEngine(EngineSettings(model=checkpoint, logprobs_mode="processed"))
    with pytest.raises(UsageError, match="'disk' or 'tensors', not 'push'"):
        SglangEngine(EngineSettings(model=checkpoint, extra={"load": "push"}))


@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is not None,
    reason="SGLang is installed here: the test is of a start without it",
)
def test_an_interpreter_without_sglang_is_reported(checkpoint: Path) -> None:
    """The start says what is missing and how to get it, instead of the import that failed first."""
    with pytest.raises(
        EngineStartError,
        match=(
            r"sglang cannot be started: SGLang is not installed in the interpreter(.|\n)*nox -s"
            r" engines"
        ),
    ):
        asyncio.run(SglangEngine(EngineSettings(model=checkpoint)).start())
