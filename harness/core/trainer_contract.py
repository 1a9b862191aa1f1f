"""Contract of a trainer: how it takes its payload, with its replay terms; what only rollouts
declare is filled in.
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
    """The contract of a trainer that is given routes of this convention.

    ``rows`` says how many rows a sample of T tokens brings (T-1: what vLLM and SGLang return),
    ``filler`` what stands in rows that were not captured, ``dtype`` the integer types that it
    takes. ``declared`` are the terms, where no ``terms`` are given. Raises ``ContractError``.
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
        abort_surfaces=False,
        kv_policy=KvPolicy.RECOMPUTE,
        replay=own,
    )


def terms_of(contract: Contract) -> ReplayTerms:
    """The replay terms of a contract. Raises ``ContractError`` where it has none."""
    if contract.replay is None:
        raise ContractError(
            "The contract declares no replay terms: make it with"
            " rollproof.replay.contract.trainer_contract."
        )
    return contract.replay
