"""Checksums of the tensors of a fake engine, and of its trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rollproof.core.records import Version
from rollproof.fakes.coded.policy import CodedPolicy

__all__ = ["tensor_checksums"]


def tensor_checksums(policy: CodedPolicy, key: Version) -> Mapping[str, str]:
    """Return the checksum of each tensor of a model with the weights ``key``, by name.

    The embedding is frozen: its checksum is the same under all weights.
    """
    names = ["lm_head.weight"]
    for layer in range(policy.num_layers):
        part = "mlp.gate" if layer in policy.moe_layers else "mlp.down_proj"
        names += [f"layers.{layer}.self_attn.o_proj.weight", f"layers.{layer}.{part}.weight"]
    digests = {"embed_tokens.weight": _digest(policy.seed, "embed_tokens.weight")}
    return digests | {name: _digest(policy.seed, name, key) for name in names}


def _digest(*parts: object) -> str:
    return hashlib.sha256("/".join(map(repr, parts)).encode()).hexdigest()
