"""Groups: a label of the user's own for each token, whose values are compared with one another.

Any column may be one: image or text, the source of a prompt, the replica, the length of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.errors import GapError
from rollproof.gap.column_checks import BoolArray, IntArray, is_present, to_labels

__all__ = ["Grouping", "to_grouping"]

# Each value has buckets, a plot and tests of its own
_MOST = 24


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Grouping:
    """The values of one label.

    Attributes:
        codes: ``(n,)``: index of each token's value in ``labels``; -1 if it has none.
        labels: the values, as text.
    """

    codes: IntArray
    labels: Sequence[str]

    def select(self, tokens: Any) -> Grouping:
        """Return the grouping of some tokens, by mask or by index."""
        return Grouping(codes=self.codes[tokens], labels=self.labels)

    def members(self, label: int) -> BoolArray:
        """``(n,)``: whether a token has the value of that index."""
        return np.asarray(self.codes == label)


def to_grouping(values: Any, name: str) -> Grouping:
    """Check a label of ``(n,)`` whole numbers or text; ``None`` and NaN are no value.

    Raises ``GapError`` if it holds something else, or more values than can be compared.
    """
    labels = to_labels(values, f"group {name}", missing=True)
    if labels.dtype.kind == "O":
        # ten million texts are counted in a second, and sorted in a minute
        index: dict[Any, int] = {}
        present = is_present(labels)
        found = [index.setdefault(label, len(index)) for label in labels[present].tolist()]
        inverse, distinct = np.array(found, dtype=np.int64), list(index)
    else:
        present = is_present(labels)
        names, inverse = np.unique(labels[present], return_inverse=True)
        distinct = names.tolist()
    if len(distinct) > _MOST:
        raise GapError(
            f"The group {name} has {len(distinct):,} values, and at most {_MOST} can be compared:"
            " give a label with fewer, such as a range or a kind."
        )
    order = sorted(
        range(len(distinct)), key=lambda code: (str(type(distinct[code])), distinct[code])
    )
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    codes = np.full(len(labels), -1)
    codes[present] = place[inverse]
    texts = [
        f"{value:g}" if isinstance(value, float) else str(value)
        for value in (distinct[code] for code in order)
    ]
    return Grouping(codes=codes, labels=texts)
