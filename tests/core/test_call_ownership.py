"""Owners of engine calls of a recording."""

from __future__ import annotations

from typing import ClassVar

from rollproof.core.call_ownership import Owners
from rollproof.core.records import Request


class _Counted(tuple[int, ...]):
    """Tokens that count how often they are compared."""

    __slots__ = ()
    compared: ClassVar[int] = 0
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        _Counted.compared += 1
        return tuple.__eq__(self, other)


def test_a_call_is_not_compared_with_every_open_request() -> None:
    """A batch has thousands of them, and each makes a call."""
    owners, count = Owners(), 200
    for number in range(count):
        owners.begin(Request(request_id=f"r{number}", prompt_ids=_Counted((7, number))))
    _Counted.compared = 0
    for number in range(count):
        assert (f"r{number}",) == owners.of((7, number), (None, (0, 0)))
    assert _Counted.compared <= 4 * count
