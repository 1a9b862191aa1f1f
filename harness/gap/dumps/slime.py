"""Dumps of slime and of miles, its fork: ``--dump-details DIR`` writes ``DIR/rollout_data/ID.pt``
and ``DIR/train_data/ID.pt`` (``--save-debug-rollout-data``, ``--save-debug-train-data``).

Read at slime 624b824 (``slime/observability/``, ``utils/types.py``). Logprobs and masks are over
the response alone. A sample has a weight version for each of its calls, not for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.records import FloatArray, Version
from rollproof.errors import GapError
from rollproof.gap.dumps.dumped_samples import Dump, DumpedSample, whole_sequence
from rollproof.gap.torch_files import is_torch_file, load_torch

__all__ = ["is_one", "read"]

_TRAINED, _SAMPLED = "train_data", "rollout_data"


def is_one(path: Path) -> bool:
    """Whether this is such a file, or the folder of ``--dump-details``."""
    if path.is_dir():
        return any(path.glob(f"{_TRAINED}/*.pt")) or any(path.glob(f"{_SAMPLED}/*.pt"))
    if not path.is_file() or not is_torch_file(path):
        return False
    return _is_payload(load_torch(path))


def read(path: Path) -> Dump:
    """Return the samples of a file, or of a folder: what was trained on where that was written.

    Raises ``GapError``.
    """
    if path.is_file():
        samples = _samples(path, {})
    elif any(path.glob(f"{_TRAINED}/*.pt")):
        samples = [
            sample
            for file in sorted(path.glob(f"{_TRAINED}/*.pt"), key=_number)
            for sample in _samples(file, _versions(path / _SAMPLED / file.name))
        ]
    else:
        # those of evaluations are named eval_ID.pt, and are not trained on
        files = [file for file in path.glob(f"{_SAMPLED}/*.pt") if "eval" not in file.stem]
        samples = [sample for file in sorted(files, key=_number) for sample in _samples(file, {})]
    # if some lack them, none are used: the gap of a part chosen by chance would mislead
    lacking = sum(sample.trainer_logprobs is None for sample in samples)
    return Dump(
        framework="slime",
        samples=samples
        if not lacking
        else [DumpedSample(rollout=sample.rollout) for sample in samples],
        lacking=f"{lacking:,} of {len(samples):,} samples have no log_probs"
        " (--save-debug-train-data writes them, --save-debug-rollout-data does not)"
        if lacking
        else "",
    )


def _is_payload(value: Any) -> bool:
    samples = value.get("samples") if isinstance(value, dict) else None
    return (
        isinstance(samples, list)
        and bool(samples)
        and all(isinstance(sample, dict) and "tokens" in sample for sample in samples)
    )


def _payload(path: Path) -> list[Mapping[str, Any]]:
    value = load_torch(path)
    if not _is_payload(value):
        raise GapError(f"{path} holds no list of samples with tokens, as slime's dumps do.")
    samples: list[Mapping[str, Any]] = value["samples"]
    return samples


def _number(file: Path) -> tuple[int, str]:
    return (int(file.stem) if file.stem.isdigit() else -1, file.name)


def _versions(file: Path) -> dict[int, Version]:
    """Return the weights of each sample by its place, where all of its calls had the same."""
    if not file.is_file():
        return {}
    return {place: _one_version(sample) for place, sample in enumerate(_payload(file))}


def _one_version(sample: Mapping[str, Any]) -> Version:
    labels = sample.get("weight_versions") or []
    # a partial rollout has several, and none of them is true of all its tokens
    same = isinstance(labels, list) and len(set(map(str, labels))) == 1
    return str(labels[0]) if same else None


def _samples(file: Path, versions: Mapping[int, Version]) -> list[DumpedSample]:
    return [
        _sample(f"{file.stem}/{place}", file, sample, versions.get(_place(sample, place)))
        for place, sample in enumerate(_payload(file))
    ]


def _place(sample: Mapping[str, Any], place: int) -> int:
    position = sample.get("rollout_position", place)
    return int(position) if isinstance(position, int) else place


def _sample(name: str, file: Path, sample: Mapping[str, Any], version: Version) -> DumpedSample:
    tokens = _numbers(sample, "tokens", file, name)
    length = sample.get("response_lengths", sample.get("response_length"))
    if not isinstance(length, int) or not 0 <= length <= len(tokens):
        raise GapError(
            f"{file}, sample {name}: its response length is {length!r}, of {len(tokens):,} tokens."
        )
    rollout = _optional(sample, "rollout_log_probs", file, name, length)
    if rollout is None:
        raise GapError(
            f"{file}, sample {name} has no rollout_log_probs: slime records them with"
            " --use-rollout-logprobs, --use-tis or --get-mismatch-metrics."
        )
    mask = _optional(sample, "loss_masks", file, name, length)
    mask = _optional(sample, "loss_mask", file, name, length) if mask is None else mask
    mask = np.ones(length) if mask is None else mask
    trainer = _optional(sample, "log_probs", file, name, length)
    first = len(tokens) - length
    return whole_sequence(
        name,
        token_ids=tokens.astype(np.int64),
        # rollout data is written before slime zeroes the mask of a removed sample
        mask=_after(first, mask * (not sample.get("remove_sample", False))),
        rollout_logprobs=_after(first, rollout),
        trainer_logprobs=None if trainer is None else _after(first, trainer),
        version=_one_version(sample) if version is None else version,
        first=first,
    )


def _after(prompt: int, response: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros(prompt), response])


def _optional(
    sample: Mapping[str, Any], column: str, file: Path, name: str, length: int
) -> FloatArray | None:
    if sample.get(column) is None:
        return None
    values = _numbers(sample, column, file, name)
    if len(values) != length:
        raise GapError(
            f"{file}, sample {name}: {column} has {len(values):,} values for {length:,} response"
            " tokens."
        )
    return values


def _numbers(sample: Mapping[str, Any], column: str, file: Path, name: str) -> FloatArray:
    value: Any = sample.get(column)
    try:
        # numpy has no bfloat16
        plain = value.double().numpy() if hasattr(value, "double") else value
        values = np.asarray(plain, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GapError(f"{file}, sample {name}: {column} holds no numbers.") from error
    if values.ndim != 1:
        raise GapError(f"{file}, sample {name}: {column} has shape {values.shape}, not (tokens,).")
    return values
