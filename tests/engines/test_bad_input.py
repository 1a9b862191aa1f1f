"""Bad input of engine conformance: what is missing or wrong is told before an engine is started, in
words of our own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rollproof.core.contract import Contract, Logprobs, ResumeBy, Rows
from rollproof.core.engine_contract import EngineTerms, PauseMode
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.model_config import model_of
from rollproof.core.records import FinishReason
from rollproof.engines.contracts import declared
from rollproof.engines.vllm import vllm_cpu
from rollproof.engines.vllm.vllm_engine import VllmEngine, engine_options, output_of
from rollproof.errors import ContractError, EngineStartError, SubjectError, UsageError

MOE = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., EngineSettings]:
    """Settings for a checkpoint whose config.json holds what is given."""

    def write(**values: Any) -> EngineSettings:
        (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
        return EngineSettings(model=tmp_path)

    return write


def test_a_dense_model_has_no_routes_to_ask_for(config: Callable[..., EngineSettings]) -> None:
    """Routes of a model without experts are refused before anything starts; without routes its
    contract declares none.
    """
    settings = config(num_hidden_layers=4)
    with pytest.raises(EngineStartError, match="has no experts, but routes are requested"):
        VllmEngine(settings)
    contract = declared("vllm", EngineSettings(model=settings.model, routes=False))
    assert (Rows.NONE, ResumeBy.ENGINE) == (contract.rows, contract.resume)


def test_a_config_without_layers_is_not_guessed(config: Callable[..., EngineSettings]) -> None:
    """The layer count comes from the config or from nowhere."""
    with pytest.raises(EngineStartError, match="lacks the number of layers"):
        VllmEngine(config(num_experts=8, num_experts_per_tok=2))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"mlp_only_layers": 3}, "mlp_only_layers in the config must be a list of layers; 3 is"),
        ({"mlp_only_layers": [0, [1]]}, "mlp_only_layers in the config must be a list of layers;"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace in the config must be a whole"),
        ({"num_dense_layers": -1}, "num_dense_layers in the config must be a whole number"),
        ({"decoder_sparse_step": 1.5}, "decoder_sparse_step in the config must be a whole number"),
        ({"vocab_size": True}, "vocab_size in the config must be a whole number from 0 on"),
        ({"num_hidden_layers": 10**9}, "has 1,000,000,000 layers; rollproof takes up to 10,000"),
    ],
)
def test_a_config_of_wrong_types_is_refused(
    config: Callable[..., EngineSettings], values: dict[str, Any], text: str
) -> None:
    """The field is named; a number of layers that cannot be is not listed first."""
    with pytest.raises(EngineStartError, match=text):
        model_of(config(**{**MOE, **values}).model)


def test_which_layers_are_moe_is_read_as_the_families_write_it(
    config: Callable[..., EngineSettings],
) -> None:
    """Dense first layers, listed dense layers and sparse steps; a nested text config counts."""

    def layers(**values: Any) -> tuple[int, ...]:
        model = model_of(config(**values).model)
        assert model is not None
        return model.moe_layers

    assert (0, 1, 2, 3) == layers(**MOE)
    assert (2, 3) == layers(**MOE, first_k_dense_replace=2)
    assert (0, 2) == layers(**MOE, mlp_only_layers=[1, 3])
    assert (1, 3) == layers(**MOE, decoder_sparse_step=2)
    assert (1, 3) == layers(**MOE, mlp_layer_types=["dense", "sparse", "dense", "sparse"])
    assert (1, 2, 3) == layers(text_config={**MOE, "num_dense_layers": 1}, num_hidden_layers=9)


def test_terms_that_cannot_be_are_refused() -> None:
    """Each says what is wrong and what is valid; the contract carries them through JSON."""
    with pytest.raises(ContractError, match="whole number of tokens"):
        EngineTerms(max_length=0, pause_modes=())
    with pytest.raises(ContractError, match="choose among"):
        EngineTerms(max_length=8, pause_modes=("sleep",))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="not pause modes of the engine"):
        EngineTerms(max_length=8, pause_modes=(PauseMode.ABORT,), recomputing=(PauseMode.KEEP,))


def test_terms_survive_json(config: Callable[..., EngineSettings]) -> None:
    """A contract with terms is read back as it was."""
    contract = declared("sglang", config(**MOE))
    assert contract == Contract.from_dict(json.loads(json.dumps(contract.to_dict())))


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins say for which releases they were run, and what to do."""
    monkeypatch.setattr(metadata, "version", lambda _: "0.40.0")
    with pytest.raises(EngineStartError, match=r"vllm-cpu 0\.32\.0, and 0\.40\.0 is installed"):
        vllm_cpu.install()
    assert "TRITON_INTERPRET" not in os.environ


def test_a_processor_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better a sentence than an illegal instruction in the middle of a start."""
    monkeypatch.setattr(metadata, "version", lambda _: "0.32.0")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags\t\t: fpu sse2 avx\n")
    with pytest.raises(EngineStartError, match="instruction sets"):
        vllm_cpu.install()


def test_options_of_the_adapter_are_checked(config: Callable[..., EngineSettings]) -> None:
    """An unknown way of loading; our own options do not reach vLLM, its options do."""
    settings = config(**MOE)
    with pytest.raises(UsageError, match="'reload' or 'edit'"):
        VllmEngine(EngineSettings(model=settings.model, extra={"load": "push"}))
    with pytest.raises(UsageError, match="no logprobs to compare"):
        VllmEngine(EngineSettings(model=settings.model, logprobs_mode="raw_logits"))
    processed = VllmEngine(
        EngineSettings(model=settings.model, logprobs_mode="processed_logprobs")
    ).contract
    assert (Logprobs.RAW, Logprobs.PROCESSED) == (
        VllmEngine(settings).contract.logprobs,
        processed.logprobs,
    )
    options = engine_options(
        EngineSettings(model=settings.model, kv_tokens=256, extra={"load": "edit", "swap_space": 0})
    )
    assert {"num_gpu_blocks_override": 9, "swap_space": 0} == {
        name: options["engine"].get(name) for name in ("num_gpu_blocks_override", "swap_space")
    }
    assert "load" not in options["engine"]


def test_a_reply_of_no_known_end_is_refused() -> None:
    """A finish reason that nobody declared is not taken for one that is."""
    part = {
        "token_ids": [1],
        "logprobs": [None],
        "routes": None,
        "reason": "repetition",
        "spans": None,
    }
    with pytest.raises(SubjectError, match="'repetition'"):
        output_of(part, 0, 0)
    output = output_of({**part, "reason": "length"}, 0, 0)
    assert FinishReason.LENGTH is output.finish_reason
    assert output.logprobs is not None
    assert str(output.logprobs[0]) == "nan"
