"""Make the contract of a trainer with routing replay.

It declares the convention of the trainer's payload and its replay terms; the fields that concern
rollouts alone are filled in.
"""

from __future__ import annotations

from typing import Any

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    Logprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.replay_contract import ReplayTerms
from rollproof.errors import ContractError

__all__ = ["terms_of", "trainer_contract"]


def trainer_contract(
    *,
    num_layers: int,
    moe_layers: tuple[int, ...],
    num_experts: int,
    top_k: int,
    terms: ReplayTerms | None = None,
    rows: Rows | str = Rows.FORWARDED,
    layer_axis: LayerAxis | str = LayerAxis.ALL,
    dtype: str = "uint8|int16|int32",
    filler: Filler | str = Filler.NONE,
    final_row: Filler | str | None = None,
    **declared: Any,
) -> Contract:
    """Return the contract of a trainer that takes routes of this convention.

    Args:
        num_layers: All layers of the model, dense ones included.
        moe_layers: Global indexes of the layers that have experts.
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        terms: How it replays.
        rows: How many rows a sample of T tokens brings (T-1: what vLLM and SGLang return).
        layer_axis: Which layers the second axis of the rows counts.
        dtype: The integer types that it takes.
        filler: The content of rows that were not captured.
        final_row: The content of the row of the last token, if ``rows`` has one.
        declared: The fields of ``terms``, if there are none.

    Raises:
        ContractError: A declaration is missing, unknown, or contradicts another.
    """
    if terms is not None and declared:
        raise ContractError(f"Give the terms or their fields, not both: {sorted(declared)}.")
    try:
        own = terms if terms is not None else ReplayTerms(**declared)
    except TypeError as error:
        raise ContractError(
            f"The replay terms are incomplete: {error}. Required: mode, free_rows, vocab."
        ) from error
    return Contract(
        rows=Rows(rows),
        final_row=None if final_row is None else Filler(final_row),
        layer_axis=LayerAxis(layer_axis),
        num_layers=num_layers,
        moe_layers=moe_layers,
        num_experts=num_experts,
        top_k=top_k,
        filler=Filler(filler),
        dtype=dtype,
        provenance=Provenance.AS_SAMPLED,
        resume=ResumeBy.NONE,
        versions=Versions.NONE,
        logprobs=Logprobs.NONE,
        # a trainer makes no engine calls, which these fields are about
        abort_surfaces=False,
        kv_policy=KvPolicy.RECOMPUTE,
        replay=own,
    )


def terms_of(contract: Contract) -> ReplayTerms:
    """Return the replay terms of a contract. Raises ``ContractError`` if it has none."""
    if contract.replay is None:
        raise ContractError(
            "The contract declares no replay terms: make it with"
            " rollproof.replay.contract.trainer_contract."
        )
    return contract.replay
