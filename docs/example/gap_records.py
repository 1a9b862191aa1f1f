"""Writes gap.parquet, as a training loop would: a healthy pair of engines, but for the first two tokens after each resume."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SEQUENCES, LENGTH, RESUMES = 64, 500, (200, 350)
random = np.random.default_rng(1)
logits = 3 * random.standard_normal((SEQUENCES, LENGTH, 32))  # of the rollout engine
noise = 0.02 * random.standard_normal(logits.shape)  # other kernels, other rounding
for resume in RESUMES:  # the resumed call saw another context
    noise[:, resume : resume + 2] = 2.5 * random.standard_normal((SEQUENCES, 2, 32))
sampled = (logits + random.gumbel(size=logits.shape)).argmax(-1)


def logprobs(scores: np.ndarray) -> np.ndarray:
    """The logprob of each sampled token, one token after the other."""
    law = scores - np.logaddexp.reduce(scores, -1, keepdims=True)
    return np.take_along_axis(law, sampled[..., None], -1).ravel()


position = np.tile(np.arange(LENGTH), SEQUENCES)
starts = np.array((0, *RESUMES))[np.searchsorted(RESUMES, position, side="right")]
columns = {
    "sequence_id": np.repeat(np.arange(SEQUENCES), LENGTH),
    "rollout_logprob": logprobs(logits),
    "trainer_logprob": logprobs(logits + noise),
    "mask": np.ones(position.size, bool),
    "position": position,
    "since_resume": np.where(starts > 0, position - starts, -1),  # negative: no resume before it
}
pq.write_table(pa.table(columns), "gap.parquet")
