"""Training batches of SkyRL: ``trainer.dump_data_batch=true`` pickles each into
``EXPORT_PATH/dumped_data``.

Read at a956457 (``skyrl/backends/skyrl_train/training_batch.py``, ``skyrl/train/trainer.py``).
Columns of the response end where the sequence ends: the last columns of ``sequences`` are theirs,
and ``response_mask`` tells tokens from padding on either side.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.records import FloatArray
from rollproof.errors import GapError
from rollproof.gap.dumps.dumped_samples import Dump, DumpedSample, whole_sequence
from rollproof.gap.dumps.restricted_pickle import load

__all__ = ["is_one", "read"]

_PICKLE = b"\x80"
_MODULE = "training_batch"
_REQUIRED = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs")


class _Batch(dict[Any, Any]):
    """Stands for a TrainingInputBatch; ``state`` is what it was pickled as."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _rebuilt(_kind: Any, state: Any) -> _Batch:
    batch = _Batch()
    batch.state = state
    return batch


def _stand_in(module: str, name: str) -> Any:
    # its last part alone, so that a fork, or a package that moved, is read as well
    if module.rpartition(".")[2] != _MODULE:
        return None
    return {"_rebuild_tensor_batch": _rebuilt, "TrainingInputBatch": _Batch}.get(name)


def is_one(path: Path) -> bool:
    """Whether this is a pickle: nothing else that ``gap`` reads is one."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(1) == _PICKLE
    except OSError:
        return False


def read(path: Path) -> Dump:
    """Return the samples of a batch. Raises ``GapError``."""
    batch = load(path, _stand_in)
    state: Any = batch.state if isinstance(batch, _Batch) else None
    stored = state.get("batch_dict") if isinstance(state, dict) else None
    if not isinstance(stored, dict):
        raise GapError(
            f"{path} is a pickle, and not of SkyRL's TrainingInputBatch (trainer.dump_data_batch):"
            " write the columns as Parquet or JSONL (docs/gap.md)."
        )
    columns = _columns(path, stored)
    metadata = state.get("metadata")
    # the last rows only fill the batch up, so that it divides among the ranks
    padding = metadata.get("pad_size", 0) if isinstance(metadata, dict) else 0
    rows = len(columns["sequences"]) - (padding if isinstance(padding, int) else 0)
    samples = [_sample(f"{path.stem}/{row}", columns, row) for row in range(rows)]
    return Dump(
        framework="SkyRL",
        samples=samples,
        lacking="" if "action_log_probs" in columns else "it has no action_log_probs",
    )


def _columns(path: Path, stored: Mapping[Any, Any]) -> dict[str, FloatArray]:
    lacking = [name for name in _REQUIRED if stored.get(name) is None]
    if lacking:
        raise GapError(
            f"{path} has no {', '.join(lacking)}: SkyRL records rollout_logprobs if"
            " generator.sampling_params.logprobs is set."
        )
    names = [*_REQUIRED, *(["action_log_probs"] if stored.get("action_log_probs") else [])]
    columns = {name: _array(path, name, stored[name]) for name in names}
    whole, response = columns["sequences"].shape, columns["response_mask"].shape
    for name, values in columns.items():
        expected = whole if name in ("sequences", "attention_mask") else response
        if values.shape != expected or values.ndim != 2 or len(values) != whole[0]:
            raise GapError(
                f"{path}: {name} has shape {values.shape}; sequences has {whole} and response_mask"
                f" {response}."
            )
    if response[1] > whole[1]:
        raise GapError(f"{path}: a response of {response[1]} places in sequences of {whole[1]}.")
    return columns


def _array(path: Path, name: str, stored: Any) -> FloatArray:
    """Return a tensor that was pickled as bytes, or by ``torch.save`` if numpy lacks its dtype."""
    try:
        if stored.get("format") == "torch":
            import torch

            tensor = torch.load(io.BytesIO(stored["data"]), weights_only=True, map_location="cpu")
            return np.asarray(tensor.double().numpy())
        flat = np.frombuffer(stored["data"], dtype=stored["dtype"])
        return flat.reshape(stored["shape"]).astype(np.float64)
    except ImportError as error:
        raise GapError(
            f"{path}: {name} is a tensor of torch: pip install 'rollproof[torch]' to read it."
        ) from error
    except Exception as error:  # whatever a damaged file happens to say
        raise GapError(f"{path}: {name} is no tensor that can be read ({error}).") from error


def _sample(name: str, columns: Mapping[str, FloatArray], row: int) -> DumpedSample:
    width = columns["response_mask"].shape[1]
    total = columns["sequences"].shape[1]
    tail = slice(total - width, total)
    own = columns["response_mask"][row] != 0
    prompt = columns["attention_mask"][row, : total - width] != 0
    # prompts are as long as the longest response allows: one may reach into the response's columns
    more = (columns["attention_mask"][row, tail] != 0) & ~own
    before = more & (np.cumsum(own) == 0)
    ids = np.concatenate(
        [
            columns["sequences"][row, : total - width][prompt],
            columns["sequences"][row, tail][before],
            columns["sequences"][row, tail][own],
        ]
    )
    first = len(ids) - int(own.sum())
    trainer = columns.get("action_log_probs")

    def spread(column: FloatArray) -> FloatArray:
        return np.concatenate([np.zeros(first), column[row][own]])

    return whole_sequence(
        name,
        token_ids=ids,
        mask=spread(columns["loss_mask"]),
        rollout_logprobs=spread(columns["rollout_logprobs"]),
        trainer_logprobs=None if trainer is None else spread(trainer),
        first=first,
    )
