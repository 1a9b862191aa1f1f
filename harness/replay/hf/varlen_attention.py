"""An attention of HF transformers for packed sequences: torch's own FlashAttention.

transformers' ``flash_attention_2`` computes the same, but needs another package; without either, a
mask separates packed sequences.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["VARLEN", "use_varlen"]

VARLEN = "rollproof_varlen"
"""The name of the attention in transformers."""


def use_varlen(model: Any) -> Any:
    """Set the attention of ``model``, and return it.

    The model must be on a GPU, in bfloat16 or float16, and its input one row of packed samples.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(VARLEN, _attend)
    AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)
    model.set_attn_implementation(VARLEN)
    return model


def _attend(
    _module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    position_ids: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Compute ``(1, tokens, heads, size)`` from ``(1, heads, tokens, size)``."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    assert attention_mask is None and position_ids is not None and len(query) == 1
    # a sample begins at each position 0
    starts = torch.nonzero(position_ids.flatten() == 0).flatten()
    bounds = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).to(torch.int32)
    longest = int(bounds.diff().max())
    groups = query.shape[1] // key.shape[1]
    rows = [
        tensor[0].transpose(0, 1).contiguous()
        for tensor in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    ]
    parameters = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = (
        {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    )
    if "scale" in parameters:
        causal["scale"] = scaling
    return varlen_attn(*rows, bounds, bounds, longest, longest, **causal)[None], None
