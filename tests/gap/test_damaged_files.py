from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollproof.errors import GapError
from rollproof.gap.pair_files import read_pairs
from rollproof.gap.table_files import load_table

ROWS = 40
TABLE = pa.table(
    {
        "sequence_id": [f"s{i // 10}" for i in range(ROWS)],
        "rollout_logprob": -np.linspace(0.1, 2.0, ROWS),
        "trainer_logprob": -np.linspace(0.1, 2.0, ROWS),
        "mask": np.ones(ROWS, np.int8),
        "rollout_routes": [[[i % 7, 1], [2, i % 5]] for i in range(ROWS)],
    }
)


def _arrow(path: Path, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, TABLE.schema, options=options) as writer:
        writer.write_table(TABLE)


def _stream(path: Path) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


WRITERS = {
    "arrow": _arrow,
    "arrow-zstd": lambda path: _arrow(path, "zstd"),
    "stream": _stream,
    "parquet": lambda path: pq.write_table(TABLE, path),
    "parquet-checksums": lambda path: pq.write_table(TABLE, path, write_page_checksum=True),
}

FLIPS = """
import json, random, sys
from pathlib import Path
from rollproof.errors import GapError
from rollproof.gap.pair_files import read_pairs
from rollproof.gap.table_files import load_table

whole, path, count = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), int(sys.argv[3])
everything = lambda schema: list(schema.names)
expected = load_table(Path(sys.argv[1]), everything)
draws, seen = random.Random(5), {"refused": 0, "same": 0, "other": 0}
for _ in range(count):
    content = bytearray(whole)
    content[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
    path.write_bytes(bytes(content))
    try:
        table = load_table(path, everything)
        read_pairs(path)
    except GapError:
        seen["refused"] += 1
    else:
        same = all(
            table.column(name).to_pylist() == expected.column(name).to_pylist()
            for name in ("sequence_id", "rollout_logprob", "trainer_logprob", "mask")
        )
        seen["same" if same else "other"] += 1
print(json.dumps(seen))
"""


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_flipped_bit_neither_ends_the_process_nor_raises_an_error_of_a_library(
    name: str, tmp_path: Path
) -> None:
    """Wherever one bit of a file is another, it is read or refused. Behind checksums, nothing else
    is read than what was written.
    """
    whole = tmp_path / "whole"
    WRITERS[name](whole)
    result = subprocess.run(
        [sys.executable, "-c", FLIPS, str(whole), str(tmp_path / "flipped"), "300"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == result.returncode, result.stderr[-2000:]
    seen = json.loads(result.stdout)
    assert 300 == sum(seen.values())
    assert seen["refused"] > 0
    if name == "parquet-checksums":
        assert 0 == seen["other"]


def test_a_small_file_that_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    """A column of one repeated value takes a kilobyte and expands to gigabytes: it is refused
    before memory is taken. A file of a million honest tokens is read.
    """
    rows = 40_000_000
    one = pa.repeat(pa.scalar(-1.0), 1_000_000)
    schema = pa.schema({"rollout_logprob": pa.float64()})
    path = tmp_path / "bomb.parquet"
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for _ in range(rows // 1_000_000):
            writer.write_table(pa.table([one], schema=schema))
    assert path.stat().st_size < 250_000
    with pytest.raises(GapError, match=r"claims to hold 0\.3 GiB"):
        load_table(path, lambda schema: list(schema.names))

    honest = tmp_path / "honest.parquet"
    values = -np.random.default_rng(0).exponential(1.0, 1_000_000)
    pq.write_table(
        pa.table(
            {
                "sequence_id": np.arange(1_000_000) // 1000,
                "rollout_logprob": values,
                "trainer_logprob": values,
                "mask": np.ones(1_000_000),
            }
        ),
        honest,
    )
    assert 1_000_000 == read_pairs(honest).n_tokens


@pytest.mark.parametrize("place", range(8))
def test_a_damaged_name_of_a_column_is_no_missing_column(tmp_path: Path, place: int) -> None:
    """No checksum of Parquet covers names: a column that may be missing is not taken for missing
    because of one damaged byte.
    """
    path = tmp_path / "pairs.parquet"
    pq.write_table(TABLE.append_column("position", [list(range(ROWS))]), path)
    content = bytearray(path.read_bytes())
    # the schema comes first in the footer
    content[content.index(b"\x08position") + 1 + place] ^= 1
    path.write_bytes(content)

    with pytest.raises(GapError, match=r"calls a column both '.*' and '.*': it is damaged"):
        read_pairs(path)


def test_a_renamed_column_is_no_damage(tmp_path: Path) -> None:
    """Tools that rename columns may keep the names of before in the file."""
    path = tmp_path / "pairs.parquet"
    renamed = [f"{name}_2" if name == "mask" else name for name in TABLE.column_names]
    schema = TABLE.schema.serialize().to_pybytes()
    table = TABLE.rename_columns(renamed)
    with pq.ParquetWriter(path, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(schema).decode()})

    assert ROWS == load_table(path, lambda _: ["mask_2"]).num_rows
