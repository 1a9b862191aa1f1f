"""Checkpoints that the gap is measured on: generated models or the user's, in two versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollproof.core.model_config import model_of
from rollproof.errors import UsageError
from rollproof.fakes.tiny_models import make_checkpoint, second_version

__all__ = ["SIZES", "few_threads", "fits", "make_models", "user_models"]

SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # deep and wide enough that half of all tokens are routed differently in some layer
        "tiny": {
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
        },
        # 1.7 billion parameters: 3.4 GB in bfloat16
        "mid": {
            "vocab_size": 16384,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
        },
    }
)
"""Sizes of Qwen3-MoE by name."""


@contextmanager
def few_threads() -> Iterator[None]:
    """Let torch compute on four threads at most while the context is open."""
    import torch

    # small models gain nothing from more, which wait for each other on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_models(
    size: str, folder: Path, *, dtype: str = "bfloat16", seed: int = 0
) -> dict[str, Path]:
    """Make two versions, ``A`` and ``B``, of a random policy in ``folder``, unless they exist.

    Raises ``UsageError`` for an unknown size.
    """
    if size not in SIZES:
        raise UsageError(f"No model size is named {size!r}; choose among {list(SIZES)}.")
    first, second = folder / size / "A", folder / size / "B"
    # the second version is made from the first, and so written after it
    if not (second / "config.json").is_file():
        with few_threads():
            make_checkpoint(first, "qwen3_moe", seed=seed, dtype=dtype, **SIZES[size])
            second_version(first, second, seed=seed + 1)
    return {"A": first, "B": second}


def user_models(path: Path, folder: Path) -> dict[str, Path]:
    """Return the user's checkpoint as version ``A``, and make a second version in ``folder``.

    Raises ``UsageError`` for a dense model, which has nothing to replay, and ``EngineStartError``
    for a folder that holds no checkpoint.
    """
    if model_of(path) is None:
        raise UsageError(
            f"The model in {path} has no experts: there is no routing to replay. Name a MoE"
            " checkpoint with --rollproof-model."
        )
    return {"A": path, "B": second_version(path, folder / "B")}


def fits(path: Path, free: int) -> str | None:
    """Return why a checkpoint does not fit on a GPU with ``free`` bytes; ``None`` if it does."""
    # engine and trainer have it one after the other; half as much again is for KV and activations
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if 1.5 * size <= free:
        return None
    return (
        f"the checkpoint in {path} has {size / 2**30:.1f} GiB, and a GPU has {free / 2**30:.1f} GiB"
        " free: it does not fit"
    )
