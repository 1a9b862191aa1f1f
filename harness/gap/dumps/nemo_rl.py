"""Training batches of NeMo-RL: ``train_data_step*.jsonl`` in its log folder, a sample a line.

Read at 7ea279a (``nemo_rl/algorithms/grpo.py``, ``utils/logger.py``): each value of a line is a
batch of one. Columns are padded on the right to the batch's longest sample; the logprob at place i
is that of the token at place i. Without the forward of the old policy (``force_on_policy_ratio``)
``prev_logprobs`` is written as zeros.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from rollproof.errors import GapError
from rollproof.gap.dumps.dumped_samples import Dump, DumpedSample, whole_sequence
from rollproof.gap.dumps.json_lines import first_line, read_lines

__all__ = ["is_one", "read"]

_FILES = "train_data_step*.jsonl"
_COLUMNS = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
_SCALARS = ("sample_loss_mask", "input_lengths")


class _Line(msgspec.Struct):
    """The columns of one sample; whatever else a line has is not used."""

    token_ids: list[list[int]]
    token_loss_mask: list[list[float]]
    sample_loss_mask: list[float]
    input_lengths: list[int]
    generation_logprobs: list[list[float]]
    prev_logprobs: list[list[float]]
    idx: int = 0


def is_one(path: Path) -> bool:
    """Whether this is such a file, or a folder of them."""
    if path.is_dir():
        return any(path.glob(_FILES))
    return path.is_file() and {"token_ids", "generation_logprobs"} <= first_line(path).keys()


def read(path: Path) -> Dump:
    """Return the samples of a file, or of all files in a folder. Raises ``GapError``."""
    files = sorted(path.glob(_FILES), key=_step) if path.is_dir() else [path]
    samples = [
        _sample(file, number, line, f"{file.stem.removeprefix('train_data_')}/{line.idx}")
        for file in files
        for number, line in read_lines(file, _Line)
    ]
    # a sample may be 0 throughout, if each of its tokens was certain: a whole dump is not
    skipped = all(
        sample.trainer_logprobs is None or not sample.trainer_logprobs.any() for sample in samples
    )
    if not skipped:
        return Dump(framework="NeMo-RL", samples=samples)
    return Dump(
        framework="NeMo-RL",
        samples=[DumpedSample(rollout=sample.rollout) for sample in samples],
        lacking="its prev_logprobs are all 0 (NeMo-RL skips that forward under"
        " force_on_policy_ratio)",
    )


def _step(file: Path) -> tuple[int, str]:
    # as text step 10 would come before step 2
    number = file.stem.removeprefix("train_data_step")
    return (int(number) if number.isdigit() else -1, file.name)


def _sample(file: Path, number: int, line: _Line, name: str) -> DumpedSample:
    lists = {column: getattr(line, column) for column in (*_COLUMNS, *_SCALARS)}
    for column, values in lists.items():
        if len(values) != 1:
            raise GapError(
                f"{file}, line {number}: {column} holds {len(values)} samples; NeMo-RL writes one a"
                " line."
            )
    length = line.input_lengths[0]
    # padding that stays would count as tokens of the response
    columns = {column: lists[column][0][:length] for column in _COLUMNS}
    if length < 0 or len(columns["token_ids"]) != length:
        raise GapError(
            f"{file}, line {number}: input_lengths is {length:,}, and token_ids has"
            f" {len(line.token_ids[0]):,}."
        )
    return whole_sequence(
        name,
        token_ids=columns["token_ids"],
        # a sample that is filtered out has 0 here, and its tokens keep the mask that they had
        mask=np.asarray(columns["token_loss_mask"]) * line.sample_loss_mask[0],
        rollout_logprobs=columns["generation_logprobs"],
        trainer_logprobs=columns["prev_logprobs"],
    )
