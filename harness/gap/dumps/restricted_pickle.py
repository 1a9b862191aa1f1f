"""Pickles read without running anything that they name.

A pickle says which functions to call with which arguments. Here only the functions that a caller
lists are called; every other name becomes an object that does nothing.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from rollproof.errors import GapError

__all__ = ["Ignored", "load"]


class Ignored:
    """Stands for a class or function that is not run, and for whatever it would have returned."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        """Do nothing, whatever the arguments."""

    def __call__(self, *_arguments: Any, **_options: Any) -> Ignored:
        """Do nothing."""
        return Ignored()

    def __setstate__(self, _state: Any) -> None:
        """Do nothing."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Do nothing."""

    def append(self, _value: Any) -> None:
        """Do nothing."""

    def extend(self, _values: Any) -> None:
        """Do nothing."""

    def add(self, _value: Any) -> None:
        """Do nothing."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, find: Callable[[str, str], Any]) -> None:
        super().__init__(file)
        self._find = find

    def find_class(self, module: str, name: str, /) -> Any:
        found = self._find(module, name)
        return Ignored if found is None else found

    # such an id names data outside the pickle, as torch's storages are: none of it is looked up
    def persistent_load(self, _pid: Any, /) -> Any:
        return Ignored()


def _check_numbers(path: Path, file: BinaryIO) -> None:
    """Raise ``GapError`` if a pickle numbers its objects higher than it could have objects: Python
    makes a table of that size, and nine bytes would take gigabytes.
    """
    size = path.stat().st_size
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name not in ("PUT", "BINPUT", "LONG_BINPUT") or argument is None:
            continue
        if argument > size:
            raise GapError(
                f"{path} numbers an object {argument:,} and has {size:,} bytes: it is damaged, or"
                " was made to exhaust memory."
            )


def load(path: Path, find: Callable[[str, str], Any]) -> Any:
    """Return the object in a pickle.

    Args:
        path: The file.
        find: Returns what stands for a module's name, or ``None`` for an ``Ignored``.

    Raises:
        GapError: The file is no pickle, or is damaged.
    """
    try:
        with path.open("rb") as file:
            _check_numbers(path, file)
            file.seek(0)
            return _Unpickler(file, find).load()
    except GapError:
        raise
    except OSError as error:
        raise GapError(f"{path} cannot be opened: {error.strerror}.") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to say
        raise GapError(
            f"{path} begins as a pickle does and cannot be read to its end"
            f" ({type(error).__name__}): it is damaged, or was cut short. Write it again."
        ) from error
