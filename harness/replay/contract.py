"""Public: the contract of a trainer with routing replay."""

from __future__ import annotations

from rollproof.core.trainer_contract import (
    terms_of,
    trainer_contract,
)

__all__ = [
    "terms_of",
    "trainer_contract",
]
