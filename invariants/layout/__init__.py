"""The family ``layout``: rows and layers reach the ranks, microbatches and routers that they belong
to, and come back.

There is one check for each transformation between a payload and router rows; subjects are layout
functions (``rollproof.layouts``).
"""

from __future__ import annotations

from rollproof.invariants.layout import (
    layer_columns,
    moved_samples,
    rank_rows,
    segments,
    token_rows,
)
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    token_rows.layout_final_row,
    token_rows.layout_no_shift,
    token_rows.layout_padding,
    token_rows.layout_unpadding,
    token_rows.layout_packing,
    token_rows.layout_alignment,
    token_rows.layout_padding_rows,
    segments.layout_segments,
    rank_rows.layout_context,
    rank_rows.layout_context_merge,
    rank_rows.layout_tensor_slice,
    rank_rows.layout_ulysses_slice,
    rank_rows.layout_flatten_order,
    rank_rows.layout_targets,
    rank_rows.layout_merge,
    layer_columns.layout_layer_map,
    layer_columns.layout_stages,
    layer_columns.layout_virtual_stages,
    layer_columns.layout_recompute,
    layer_columns.layout_chunk_order,
    layer_columns.layout_stage_gather,
    moved_samples.layout_microbatches,
    moved_samples.layout_restore,
    moved_samples.layout_samples,
    moved_samples.layout_expert_ids,
    moved_samples.layout_accepts,
    moved_samples.layout_returns,
    moved_samples.layout_input,
    moved_samples.layout_refuses,
)
"""The checks of the family, in the order of a report."""
