"""Corrections for off-policy rollouts: importance weights, their bounds, rejection, and an exact
reference in float64.

``correction_subject`` has the protocol of a subject, ``expected_correction`` (with
``expected_loss`` and ``expected_metrics``) the reference, ``rounding`` its tolerances, and
``correction_cases`` the batches that test a subject.
"""

from __future__ import annotations

from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import (
    Aggregate,
    Aggregation,
    Arrays,
    CorrectionTerms,
    Denominator,
    FloatType,
    Gradient,
    Level,
    LossKind,
    MaskedWeights,
    Metric,
    Missing,
    Normalise,
    Pair,
    Rejection,
    RejectionChannel,
    Sign,
    StaleTokens,
    Statistic,
)
from rollproof.corrections.correction_subject import (
    CorrectionSubject,
    correction_contract,
    correction_function,
)

__all__ = [
    "Aggregate",
    "Aggregation",
    "Arrays",
    "Correction",
    "CorrectionBatch",
    "CorrectionSubject",
    "CorrectionTerms",
    "Denominator",
    "FloatType",
    "Gradient",
    "Level",
    "LossKind",
    "MaskedWeights",
    "Metric",
    "Missing",
    "Normalise",
    "Pair",
    "Rejection",
    "RejectionChannel",
    "Sign",
    "StaleTokens",
    "Statistic",
    "correction_contract",
    "correction_function",
]
