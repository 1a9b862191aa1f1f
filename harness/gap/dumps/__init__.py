"""Files that RL frameworks write of the rollouts they train on, read without the framework.

``read_dump(path)`` recognises what it is given by its contents:

- NeMo-RL: ``train_data_step*.jsonl``, or the folder that holds them;
- prime-rl and verifiers: ``traces.jsonl``;
- slime and miles: a file of ``--save-debug-train-data`` or ``--save-debug-rollout-data``, or the
  folder of ``--dump-details``;
- SkyRL: a pickle of ``trainer.dump_data_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rollproof.errors import GapError
from rollproof.gap.dumps import nemo_rl, skyrl, slime, verifiers
from rollproof.gap.dumps.dumped_samples import Dump, DumpedSample

__all__ = ["Dump", "DumpedSample", "read_dump"]

# SkyRL last: it takes every pickle, whoever wrote it
_FORMATS: Sequence[tuple[Callable[[Path], bool], Callable[[Path], Dump]]] = (
    (nemo_rl.is_one, nemo_rl.read),
    (verifiers.is_one, verifiers.read),
    (slime.is_one, slime.read),
    (skyrl.is_one, skyrl.read),
)


def read_dump(path: Path) -> Dump | None:
    """Return the samples of a framework's dump, or ``None`` if the file or folder is no dump.

    Nothing of the framework is imported, and nothing that a pickle names is run.

    Args:
        path: The file, or the folder that the framework wrote several into.

    Raises:
        GapError: It is a dump, and is damaged, cut short, or holds no token that was sampled.
    """
    for is_one, read in _FORMATS:
        if is_one(path):
            dump = read(path)
            if not any(sample.rollout.response_ids for sample in dump.samples):
                raise GapError(
                    f"{path} is a dump of {dump.framework} without a sampled token: there is"
                    " nothing to compare. Token ids and their logprobs must have been recorded."
                )
            return dump
    return None
