"""One call of a layout function, as plain numbers.

Its inputs are made from them for the call, and again when the call is judged.
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
    """The inputs of a call; each function of ``functions`` reads some of these fields.

    Attributes:
        layout: the conventions and sizes.
        coding: how payloads are written.
        case: the situation that the call was chosen for.
        lengths: tokens of each sample.
        prompts: tokens of each sample's prompt.
        held: rows of each sample's payload.
        rank: the rank that calls.
        chunk: its model chunk.
        microbatches: how many microbatches there are.
        parts: over how many parts samples are divided.
        most: how many tokens a microbatch may have.
        recompute: whether backward passes recompute.
        kept: the samples that a filter retains.
        segments: ``(start, rows, version)`` of each engine call of one sample.
        defect: what is wrong with the inputs; ``""`` if they are sound.
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
        """Return one coded payload ``(held, columns, width)`` per sample."""
        return [self.coding.payload(i, rows) for i, rows in enumerate(self.held or self.lengths)]

    def tokens(self) -> list[IntArray]:
        """Return one ``(tokens,)`` per sample: ids that encode sample and position, never 0."""
        return [
            # 0 is what padding usually holds
            np.arange(length, dtype=np.int64) + 1 + i * self.coding.positions
            for i, length in enumerate(self.lengths)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form without default values; ``from_dict`` is its inverse."""
        plain = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in ("layout", "coding", "rank")
            and getattr(self, entry.name) != entry.default
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
                f"A call needs a layout and a coding; its fields are {sorted(values)}."
            )
        try:
            values["layout"] = _layout(_hashed(values["layout"]))
            values["coding"] = Coding(**values["coding"])
            values["rank"] = Rank(**values.get("rank", {}))
            return cls(**values)
        except TypeError as error:
            raise LayoutError(f"This is not a call of a layout function: {error}.") from error


@lru_cache(maxsize=256)
def _layout(items: tuple[Any, ...]) -> Layout:
    # thousands of calls share a layout, and reading it takes ten times as long as judging a call
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
