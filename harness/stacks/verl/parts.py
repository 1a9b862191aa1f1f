"""The parts of verl that are judged, as factories of subjects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollproof.case import Case
from rollproof.stacks.verl.client import ClientSubject
from rollproof.stacks.verl.server import CONVENTIONS
from rollproof.stacks.verl.versions import Verl

__all__ = ["Part", "parts_of"]


@dataclass(frozen=True, eq=False)
class Part:
    """A factory of subjects, with the flavours that it speaks."""

    name: str
    make: Callable[[], Any]
    flavours: tuple[str, ...] = tuple(CONVENTIONS)

    def __call__(self) -> Any:
        """A fresh subject."""
        return self.make()


def parts_of(verl: Verl) -> Mapping[str, Part]:
    """All parts, by name."""
    parts = (Part("client", lambda: ClientSubject(verl)),)
    return {part.name: part for part in parts}
