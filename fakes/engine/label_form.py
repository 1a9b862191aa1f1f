"""The form of a stack's own labels, in which the harness publishes its labels."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from rollproof.core.records import Version

__all__ = ["in_form"]


def in_form(number: int, published: Iterable[tuple[Collection[int], Version]]) -> int | str:
    """Return the label ``number`` in the form of the labels that the stack itself published.

    A stack may read its labels: where it published ``step-3`` for label 3, label 4 is ``step-4``.
    If its labels are strings in which the number does not stand, it is the number as a string.

    Args:
        number: the fleet's label.
        published: labels of the stack, each with the fleet's labels of the same weights.
    """
    texts = [(numbers, label) for numbers, label in published if isinstance(label, str)]
    for numbers, text in texts:
        # the odd parts are the numbers in it
        parts = re.split(r"([0-9]+)", text)
        own = [i for i in range(1, len(parts), 2) if int(parts[i]) in numbers]
        if len(own) == 1:
            width = len(parts[own[0]]) if parts[own[0]].startswith("0") else 1
            parts[own[0]] = str(number).zfill(width)
            return "".join(parts)
    return str(number) if texts else number
