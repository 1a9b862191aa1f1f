"""Further columns of a training batch: what a stack carries next to tokens, masks, logprobs and
routes (advantages, rewards, versions, token types, logprobs of a reference model).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from rollproof.core.error_text import show
from rollproof.errors import ContractError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Column", "ColumnExtent", "as_columns"]


class ColumnExtent(StrEnum):
    """For what a column holds a value, and who makes it one for each place."""

    RESPONSE = "response"
    """The sample has a value for each token of its response, the batch for each place."""
    TOKENS = "tokens"
    """The sample has a value for each token of prompt and response, the batch for each place."""
    TRAINED = "trained"
    """The sample has one value, which the batch holds at each trained token (an advantage of the
    whole response).
    """
    LAST = "last"
    """The sample has one value, which the batch holds at the last token of the response, or at the
    last trained one (the reward of an outcome).
    """
    ROW = "row"
    """The sample and its row have one value (a reward)."""
    GROUP = "group"
    """The sample and its row have a label that the samples of one prompt share. A batch may have
    other labels, as long as the same samples share one.
    """

    @property
    def placed(self) -> bool:
        """Whether the batch has a value for each place."""
        return self not in (ColumnExtent.ROW, ColumnExtent.GROUP)

    @property
    def per_token(self) -> bool:
        """Whether the sample has a value for each token."""
        return self in (ColumnExtent.RESPONSE, ColumnExtent.TOKENS)


_ROUNDING: Mapping[str, float] = {
    "float64": 2.0**-48,
    "float32": 2.0**-22,
    "float16": 2.0**-9,
    "bfloat16": 2.0**-6,
    **dict.fromkeys(("int64", "int32", "int16", "int8", "uint8"), 0.0),
}
"""Relative errors that a type allows: four times its unit roundoff, so that one more rounding on
the way is no fault; integers are exact.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One further column of a batch. Raises ``ContractError`` for what cannot be declared.

    Attributes:
        name: Its key in ``Rollout.columns`` and ``BatchRow.columns`` or, with one value a sample
            or row, in their ``values``.
        extent: For what it holds a value.
        filler: The number at places that no value belongs to, or ``"nan"``: padding and, unless
            ``extent`` is ``tokens``, the prompt. ``None``: any.
        dtype: The narrowest type that its values pass: a numpy name, or ``bfloat16``. Values may
            differ by its rounding. A column of labels needs none.
    """

    name: str
    extent: ColumnExtent = ColumnExtent.RESPONSE
    filler: float | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        problems = []
        name: object = self.name
        if not isinstance(name, str) or not name:
            problems.append(f"name={show(name)} must be a text.")
        try:
            object.__setattr__(self, "extent", ColumnExtent(self.extent))
        except ValueError:
            problems.append(f"extent={show(self.extent)} must be one of {list(ColumnExtent)}.")
        dtype: object = self.dtype
        if not isinstance(dtype, str) or dtype not in _ROUNDING:
            problems.append(f"dtype={show(self.dtype)} must be one of {list(_ROUNDING)}.")
        filler: object = self.filler
        if filler == "nan":
            filler = math.nan
        if filler is not None and (
            isinstance(filler, bool)
            or not isinstance(filler, int | float)
            # an array would hold it as an object, which compares with no other
            or abs(filler) > sys.float_info.max
        ):
            problems.append(
                f"filler={show(self.filler)} must be a number that a float can be, 'nan' or None."
            )
        elif isinstance(filler, float) and math.isnan(filler):
            # one object for all, so that equal columns compare equal
            object.__setattr__(self, "filler", math.nan)
            if not problems and not self.is_float:
                problems.append(f"filler='nan' contradicts dtype={self.dtype!r}, which has none.")
        elif filler is not None and not problems and not self.extent.placed:
            problems.append(f"filler={show(filler)} contradicts extent={self.extent}: no place.")
        if problems:
            raise ContractError("The column cannot be used:\n  - " + "\n  - ".join(problems))

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return "float" in self.dtype

    @property
    def rounding(self) -> float:
        """The relative error that ``dtype`` allows."""
        return _ROUNDING[self.dtype]

    def equal(self, actual: npt.ArrayLike, expected: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which of two arrays' numbers are equal, up to the rounding of ``dtype``; NaN
        equals NaN.
        """
        # here, because a stack that declares a contract must not import numpy for it
        import numpy as np

        return np.isclose(actual, expected, rtol=self.rounding, atol=0.0, equal_nan=True)

    def is_filler(self, actual: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which numbers are the filler; all, if any is."""
        import numpy as np

        if self.filler is None:
            return np.ones(np.shape(actual), dtype=bool)
        return self.equal(actual, self.filler)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; ``from_dict`` is its inverse."""
        filler = self.filler
        spelt = "nan" if filler is not None and math.isnan(filler) else filler
        return {
            "name": self.name,
            "extent": str(self.extent),
            "filler": spelt,
            "dtype": self.dtype,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``ContractError`` on unknown or missing keys, and for
        what is no mapping.
        """
        valid = [field.name for field in fields(cls)]
        if not isinstance(data, Mapping) or "name" not in data or not set(data) <= set(valid):
            raise ContractError(
                f"A column must be a Column or a mapping of its fields {valid}, at least the name,"
                f" not {show(data)}."
            )
        return cls(**data)


def as_columns(value: object) -> tuple[Column, ...]:
    """Return declared columns, each a ``Column`` or a mapping of its fields.

    Raises:
        ContractError: ``value`` is anything else, or two columns have one name.
    """
    if not isinstance(value, list | tuple):
        raise ContractError(f"columns={show(value)} must be a tuple of Column.")
    columns = tuple(item if isinstance(item, Column) else Column.from_dict(item) for item in value)
    names = [column.name for column in columns]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ContractError(f"columns declares {doubled} more than once.")
    return columns
