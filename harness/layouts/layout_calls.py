"""Calls: one call of a layout function, as plain numbers from which its inputs are made, and made
again when it is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, Self

import numpy as np

from rollproof.core.records import IntArray
from rollproof.errors import LayoutError
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Rank
from rollproof.layouts.payloads import Coding

__all__ = ["Call"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a function is handed: which of the fields it reads is the function's (``functions``).

    ``lengths`` are tokens of the samples, ``prompts`` those of their prompts, ``held`` the rows of
    their payloads. ``rank`` and ``chunk`` say who asks, ``microbatches`` how many there are,
    ``parts`` over how many samples are divided, ``most`` how many tokens a microbatch may have;
    ``kept`` are the samples that a filter keeps, ``segments`` the ``(start, rows, version)`` of the
    calls of one sample. ``case`` says what it was chosen for, ``defect`` what is wrong with it
    (``""``: nothing).
    """

    layout: Layout
    coding: Coding
    case: str = ""
    lengths: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    rank: Rank = field(default_factory=Rank)
    chunk: int = 0
    microbatches: int = 0
    parts: int = 1
    most: int = 0
    recompute: bool = False
    kept: tuple[int, ...] = ()
    segments: tuple[tuple[int, int, int], ...] = ()
    defect: str = ""

    @property
    def responses(self) -> tuple[int, ...]:
        """Response lengths of the samples."""
        return tuple(
            total - prompt for total, prompt in zip(self.lengths, self.prompts, strict=True)
        )

    def payloads(self) -> list[IntArray]:
        """One coded payload ``(held, columns, width)`` per sample."""
        return [self.coding.payload(i, rows) for i, rows in enumerate(self.held or self.lengths)]

    def tokens(self) -> list[IntArray]:
        """One ``(tokens,)`` per sample: ids that say sample and position, none of them 0."""
        return [
            np.arange(length, dtype=np.int64) + 1 + i * self.coding.positions
            for i, length in enumerate(self.lengths)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without what equals its default; ``from_dict`` is its inverse."""
        plain = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("layout", "coding", "rank")
            and getattr(self, one.name) != one.default
        }
        listed = {key: _lists(value) for key, value in plain.items()}
        rank = {key: value for key, value in asdict(self.rank).items() if value}
        return {
            "layout": self.layout.to_dict(),
            "coding": asdict(self.coding),
            **({"rank": rank} if rank else {}),
            **listed,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``LayoutError``."""
        values = {key: _tuples(value) for key, value in data.items()}
        if not isinstance(values.get("layout"), Mapping) or not isinstance(
            values.get("coding"), Mapping
        ):
            raise LayoutError(
                f"A call names a layout and a coding, and these are {sorted(values)}."
            )
        try:
            values["layout"] = _layout(_hashed(values["layout"]))
            values["coding"] = Coding(**values["coding"])
            values["rank"] = Rank(**values.get("rank", {}))
            return cls(**values)
        except TypeError as error:
            raise LayoutError(f"This is no call of a layout function: {error}.") from error


@lru_cache(maxsize=256)
def _layout(items: tuple[Any, ...]) -> Layout:
    """Thousands of calls share a layout; reading it takes ten times as long as judging one."""
    return Layout.from_dict(_mapped(items))


def _hashed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ("{}", *((key, _hashed(inner)) for key, inner in value.items()))
    return tuple(_hashed(inner) for inner in value) if isinstance(value, list | tuple) else value


def _mapped(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("{}",):
        return {key: _mapped(inner) for key, inner in value[1:]}
    return value


def _lists(value: Any) -> Any:
    return [_lists(inner) for inner in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list | tuple) else value
