"""Classes under the names that SkyRL's pickles carry: the module's last name is what counts."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Cursed", "TrainingInputBatch", "write_batch"]


def _rebuild_tensor_batch(kind: type, state: Any) -> Any:
    raise AssertionError("the reader has a stand-in of its own for this name")


class TrainingInputBatch(dict[str, Any]):
    """Pickled as SkyRL pickles it: a function and a state of bytes, shapes and dtypes."""

    metadata: Any = None

    def __reduce__(self) -> Any:
        """Return what SkyRL's own ``__reduce__`` returns."""
        stored = {
            name: value
            if isinstance(value, dict) or value is None
            else {
                "format": "numpy",
                "data": np.ascontiguousarray(value).tobytes(),
                "shape": np.shape(value),
                "dtype": str(np.asarray(value).dtype),
            }
            for name, value in self.items()
        }
        state = {"batch_dict": stored, "batch_size": 2, "device": None, "metadata": self.metadata}
        return (_rebuild_tensor_batch, (type(self), state))


class Cursed:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        """Name a function with an effect."""
        return (os.mkdir, (str(self.path),))


def write_batch(path: Path, columns: dict[str, Any], metadata: Any = None) -> None:
    """Write a batch as ``trainer.dump_data_batch`` does."""
    batch = TrainingInputBatch(columns)
    batch.metadata = metadata
    path.write_bytes(pickle.dumps(batch))
