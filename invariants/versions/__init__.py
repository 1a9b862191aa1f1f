"""The family ``versions``: version tags name the weights that sampled the tokens."""

from __future__ import annotations

from rollproof.invariants.versions import (
    engine_labels,
    published_labels,
    sample_tags,
    token_tags,
)
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    sample_tags.versions_present,
    sample_tags.versions_published,
    sample_tags.versions_sample_tag,
    sample_tags.versions_min_max,
    sample_tags.versions_bounds,
    sample_tags.versions_call_tags,
    token_tags.versions_spans_cover,
    token_tags.versions_span_tags,
    token_tags.versions_one_tag_per_token,
    token_tags.versions_token_tags,
    engine_labels.versions_engine_tags,
    engine_labels.versions_unlabelled_update,
    engine_labels.versions_unknown_stays_unknown,
    published_labels.versions_label_with_weights,
)
"""The checks of the family, in the order of a report."""
