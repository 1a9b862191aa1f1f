"""Writes gap.parquet, as a training loop would: a healthy pair of engines, but for the first two tokens after each resume."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.gap_faults import GapWorld, gap_columns

columns = gap_columns("resume boundary", seed=1, world=GapWorld(sequences=64, length=500))
pq.write_table(pa.table(columns), "gap.parquet")
