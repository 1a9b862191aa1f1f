"""A contract in a file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from rollproof.core.contract import Contract
from rollproof.errors import ContractError, UsageError

__all__ = ["read_contract"]


def read_contract(path: Path) -> Contract:
    """Return the contract in a file: TOML, or JSON if its name ends in ``.json``.

    Raises:
        UsageError: the file cannot be read, or holds something else.
        ContractError: its fields do not make a contract.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"The contract {path} cannot be read: {error}.") from error
    if not isinstance(data, dict):
        raise UsageError(
            f"The contract {path} must be an object with the fields of docs/contract.md, not a"
            f" {type(data).__name__}."
        )
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }
    try:
        return Contract(**fields)
    except ContractError as error:
        raise ContractError(f"{path}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"The contract {path} cannot be read: {error}.") from error
