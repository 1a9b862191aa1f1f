"""Convert what a correction returned into arrays, or say why it is of the wrong type."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.correction_records import Correction
from rollproof.core.correction_terms import CorrectionTerms, LossKind
from rollproof.core.error_text import describe_error, show
from rollproof.core.records import FloatArray

__all__ = ["CorrectionMisfit", "as_metrics", "as_number", "as_tokens_array", "missing_parts"]


class CorrectionMisfit(Exception):
    """A correction returned another type or shape than expected; the text names both."""


def missing_parts(returned: Correction, terms: CorrectionTerms) -> list[str]:
    """Return what the contract promises and the result lacks, in words."""
    lacks = []
    if terms.weights and returned.weights is None:
        lacks.append("weights")
    if terms.rejects and terms.rejects_mask and returned.mask is None:
        lacks.append("a mask")
    if terms.loss is not LossKind.NONE and returned.loss is None:
        lacks.append("a loss")
    lacks += [f"metrics[{name!r}]" for name, _ in terms.metrics if name not in returned.metrics]
    return lacks


def as_tokens_array(value: Any, what: str, shape: tuple[int, ...]) -> FloatArray:
    """Read an array ``(sequences, tokens)``, ``(sequences, 1)`` or ``(sequences,)`` as one number
    per token.

    Raises ``CorrectionMisfit`` for any other shape or type.
    """
    array = _array(value, what)
    rows, tokens = shape
    if array.shape == (rows, tokens):
        return array
    if array.shape in ((rows,), (rows, 1)):
        return np.repeat(array.reshape(rows, 1), tokens, axis=1)
    raise CorrectionMisfit(
        f"{what} of shape {array.shape}: expected {(rows, tokens)}, or one number per sequence,"
        f" {(rows, 1)} or {(rows,)}"
    )


def as_number(value: Any, what: str) -> float:
    """Read a single number. Raises ``CorrectionMisfit``."""
    array = _array(value, what)
    if array.size != 1:
        raise CorrectionMisfit(f"{what} of shape {array.shape}: expected a single number")
    return float(array.reshape(()))


def as_metrics(value: Any, terms: CorrectionTerms) -> dict[str, float]:
    """Read those metrics that the contract declares. Raises ``CorrectionMisfit``."""
    return {name: as_number(value[name], f"metrics[{name!r}]") for name, _ in terms.metrics}


def _array(value: Any, what: str) -> FloatArray:
    plain = value
    if hasattr(value, "detach"):
        plain = value.detach().cpu()
        # numpy has no bfloat16
        plain = plain.double().numpy() if hasattr(plain, "double") else plain
    try:
        array = np.array(plain)
    except (TypeError, ValueError) as error:
        raise CorrectionMisfit(
            f"{what}, {_kind(value)}, is no array: {describe_error(error)}"
        ) from error
    # a string of digits would pass for a number in what follows
    if array.dtype.kind not in "iubf":
        raise CorrectionMisfit(f"{what}, {_kind(value)}: expected numbers")
    return array.astype(np.float64)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} {show(value)}" if value is not None else "None"
