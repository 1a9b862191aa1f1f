"""Files of ``torch.save``, read with ``weights_only``: nothing that they name is run."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.errors import GapError

__all__ = ["is_torch_file", "load_torch"]

_ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
"""In torch's message: the name that a file wants to call."""


def is_torch_file(path: Path) -> bool:
    """Whether a file is what ``torch.save`` writes since torch 1.6."""
    try:
        with path.open("rb") as file:
            # a pickle may end with the bytes of such a file, where zipfile looks for a directory
            if file.read(len(_ZIP)) != _ZIP:
                return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    # a damaged directory: names that are no text, versions of the format that do not exist
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


def load_torch(path: Path) -> Any:
    """Return what was saved: tensors (on the CPU), arrays, numbers and text in containers.

    Raises:
        GapError: torch is not installed, the file is damaged, or it holds objects of classes.
    """
    try:
        import torch
    except ImportError as error:
        raise GapError(
            f"{path} was written by torch.save: pip install 'rollproof[torch]' to read it."
        ) from error
    try:
        with torch.serialization.safe_globals(_numpy_names()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a damaged file happens to say
        refused = _REFUSED.search(str(error))
        problem = (
            f"holds an object of {refused[1]}, and objects of classes are not loaded from a file"
            if refused
            else "is damaged, or was cut short"
        )
        raise GapError(
            f"{path} {problem}: save tensors, numbers and text in dicts and lists."
        ) from error


def _numpy_names() -> list[Any]:
    """Return the functions and classes that rebuild arrays and scalars of numpy."""
    pieces = [np.float64(0), np.zeros(1)]
    rebuild = [piece.__reduce__()[0] for piece in pieces]
    dtypes = [type(np.dtype(kind)) for kind in np.typecodes["AllInteger"] + "efdg?SU"]
    return [*rebuild, np.ndarray, np.dtype, *dtypes]
