"""Files: traces, reports, columns of the gap, dumps, contracts, plans and lists of failures."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from rollproof.contracts.contract_file import read_contract
from rollproof.core.case import Case
from rollproof.core.model_config import end_tokens_of, kv_groups_of, model_of
from rollproof.errors import RollproofError
from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.known_bugs._planting import ABORTED
from rollproof.gap.dumps import read_dump
from rollproof.gap.limits import limits_named
from rollproof.store import TraceWriter, dump_trace
from rollproof.verification.expected_failures import ExpectedFailures, Outcome
from rollproof.verification.runner import run_case
from tools.fuzz.mutations import Inputs, damaged_bytes, damaged_json, one_of
from tools.fuzz.target import Broken, Target, run_command

__all__ = ["FILES", "gap_parquet", "report_bytes", "sound_trace", "trace_arrow"]


def sound_trace(folder: Path) -> Path:
    """Write a trace with an abort into a folder, and return its path."""
    name, factory = next(iter(REFERENCES.items()))
    dump_trace(run_case(factory, ABORTED, recipe={"reference": name}), folder / "trace.json")
    return folder / "trace.json"


def _trace_json() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        data = json.loads(sound_trace(Path(folder)).read_bytes())
    del data["checksum"]
    return data


def trace_arrow() -> bytes:
    """Return the bytes of a trace in Arrow form."""
    name, factory = next(iter(REFERENCES.items()))
    trace = run_case(factory, ABORTED, recipe={"reference": name})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.arrow"
        with TraceWriter(path, trace.header) as writer:
            for event in trace.events:
                writer.append(event)
        return path.read_bytes()


def _damaged_headers() -> Inputs:
    trace = _trace_json()
    headers = damaged_json(trace["header"])
    return lambda changes: {**trace, "header": headers(changes)}


def _gap_table() -> pa.Table:
    return pa.table(
        {
            "sequence_id": ["a", "a", "b", "b", "c"],
            "position": [0, 1, 0, 1, 0],
            "token": [5, 6, 7, 8, 9],
            "rollout_logprob": [-0.5, -1.5, -0.25, -2.0, -1.0],
            "trainer_logprob": [-0.5, -1.25, -0.25, -2.5, -1.0],
            "mask": [True, True, True, False, True],
        }
    )


def gap_parquet() -> bytes:
    """Return the bytes of a table of logprobs, with a checksum a page."""
    sink = io.BytesIO()
    parquet.write_table(_gap_table(), sink, write_page_checksum=True)
    return sink.getvalue()


def _gap_arrow() -> bytes:
    sink = io.BytesIO()
    table = _gap_table()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _contract() -> dict[str, Any]:
    return {
        "resume": "client",
        "abort_surfaces": False,
        "versions": "none",
        "logprobs": "none",
        "kv_policy": "recompute",
        "rows": "T-1",
        "num_layers": 3,
        "moe_layers": [0, 1, 2],
        "num_experts": 8,
        "top_k": 2,
        "layer_axis": "all",
        "filler": "none",
        "dtype": "uint8",
        "provenance": "as-sampled",
        "limits": {"length": 4096, "turns": 4},
        "multi_turn": True,
    }


def _plan() -> dict[str, Any]:
    return {
        "seed": 3,
        "faults": [{"do": "truncate", "path": "/generate", "nth": [2], "keep": 0.5}],
        "actions": [{"do": "abort", "when": {"request": "r1", "tokens": 2}}],
    }


_PLAN_TOML = b"""# a plan
seed = 3
[[faults]]
do = "truncate"
path = "/generate"
nth = [2]
keep = 0.5
[[actions]]
do = "abort"
when = { request = "r1", tokens = 2 }
"""
_CONTRACT_TOML = b"""resume = "client"  # at the client
abort_surfaces = false
versions = "none"
logprobs = "none"
kv_policy = "recompute"
rows = "T-1"
num_layers = 3
moe_layers = [0, 1, 2]
num_experts = 8
top_k = 2
layer_axis = "all"
filler = "none"
dtype = "uint8"
provenance = "as-sampled"
"""
_LIMITS = b"""[profile.mine]
about = "of our own"
temperature = 1.0
[profile.mine.limits]
pearson = { target = 0.998, warn = 0.99, fail = 0.98, side = "below", source = "ours" }
F2 = { target = 7e-4, warn = 3e-3, fail = 1e-2, source = "theirs" }
"""
_CONFIG = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "layer_types": ["a", "b"],
    "vocab_size": 512,
    "eos_token_id": [1, 2],
}
_NESTED_CONFIG = {"text_config": {**_CONFIG, "mlp_layer_types": ["dense", "sparse"]}}


def report_bytes() -> bytes:
    """Return the JSON report of ``check`` on a trace, with its checksum."""
    with tempfile.TemporaryDirectory() as folder:
        path = sound_trace(Path(folder))
        return run_command("check", str(path), "--json", "-").encode()


def _report() -> Any:
    data = json.loads(report_bytes())
    data.pop("checksum", None)
    return data


def _gap_csv() -> bytes:
    sink = io.BytesIO()
    csv.write_csv(_gap_table(), sink)
    return sink.getvalue()


def _gap_jsonl() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in _gap_table().to_pylist()).encode()


def _gap_npz() -> bytes:
    sink = io.BytesIO()
    columns = _gap_table().to_pydict()
    np.savez(sink, **{name: np.asarray(values) for name, values in columns.items()})
    return sink.getvalue()


def _gap_torch() -> bytes:
    import torch

    sink = io.BytesIO()
    columns = _gap_table().to_pydict()
    numbers = {name: torch.tensor(v) for name, v in columns.items() if name != "sequence_id"}
    torch.save({**numbers, "sequence_id": [0, 0, 1, 1, 2]}, sink)
    return sink.getvalue()


_NEMO_RL = {
    "input_lengths": [5],
    "token_ids": [[11, 12, 21, 22, 23, 0]],
    "token_loss_mask": [[0, 0, 1, 1, 1, 0]],
    "sample_loss_mask": [1.0],
    "generation_logprobs": [[0.0, 0.0, -0.1, -0.2, -0.3, 0.0]],
    "prev_logprobs": [[-9.0, -9.0, -0.11, -0.22, -0.33, 0.0]],
    "idx": 0,
}
_VERIFIERS = {
    "run": {"work": {"policy": {"start": 4, "end": 4}}},
    "traces": [
        {
            "id": "t",
            "agent": {"trainable": True},
            "nodes": [
                {"parent": None, "token_ids": [1], "mask": [False], "logprobs": []},
                {"parent": 0, "token_ids": [3, 10], "mask": [False, True], "logprobs": [-0.1]},
                {"parent": 0, "token_ids": [4, 12], "mask": [False, True], "logprobs": [-0.3]},
            ],
        }
    ],
}


def _lines(sound: Any) -> Inputs:
    """Lines of JSON, one of them damaged."""
    text = json.dumps(sound).encode()
    damaged = one_of(damaged_json(sound), damaged_bytes(text))
    return lambda changes: text + b"\n" + _content(damaged(changes)) + b"\n"


_MODULE = ".training_batch"


class TrainingInputBatch(dict[str, Any]):
    """Pickled as SkyRL pickles its batches."""

    def __reduce__(self) -> Any:
        """Return a function by name, and a state of bytes, shapes and dtypes."""
        stored = {
            name: {
                "format": "numpy",
                "data": value.tobytes(),
                "shape": value.shape,
                "dtype": str(value.dtype),
            }
            for name, value in self.items()
        }
        metadata = {"pad_size": 0, "uids": ["a", "b"]}
        state = {"batch_dict": stored, "batch_size": 2, "device": None, "metadata": metadata}
        return _rebuild_tensor_batch, (type(self), state)


def _rebuild_tensor_batch(*_: Any) -> None:
    raise AssertionError("the reader has a stand-in for this name")


def _skyrl() -> bytes:
    batch = TrainingInputBatch(
        sequences=np.array([[1, 2, 11, 12, 13], [0, 3, 4, 5, 14]]),
        attention_mask=np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
        response_mask=np.array([[1, 1, 1], [0, 0, 1]]),
        loss_mask=np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], np.float32),
        rollout_logprobs=np.array([[-0.5, -1.0, -1.5], [0.0, 0.0, -2.0]], np.float32),
        action_log_probs=np.array([[-0.25, -1.0, -1.5], [-7.0, -7.0, -2.5]], np.float32),
    )
    # the last part of a module's name is what the reader goes by
    assert len(__name__) > len(_MODULE)
    return pickle.dumps(batch).replace(
        __name__.encode(), _MODULE.rjust(len(__name__), "x").encode()
    )


def _slime() -> bytes:
    import torch

    sample = {
        "tokens": [1, 2, 11, 12],
        "response_length": 2,
        "loss_mask": [1, 1],
        "rollout_log_probs": [-0.5, -0.25],
        "weight_versions": ["1"],
        "remove_sample": False,
        "index": 0,
    }
    sink = io.BytesIO()
    torch.save({"rollout_id": 3, "samples": [sample, {**sample, "index": 1}]}, sink)
    return sink.getvalue()


_EXPECTED = """# known
[[expected]]
check = "routes.rows"  # since then
reason = "concatenated"
issue = "verl#6029"
shows = ["too many route rows"]
since = 2026-11-28

# another
[[expected]]
check = "stitch.tokens"
reason = "twice"
subject = "S"
"""


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the file that is read; a folder for each would take longer than reading it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextlib.contextmanager
def _written(folder: Path, *names: str, data: Any) -> Iterator[Path]:
    """Write an input to files of a folder; yields the first, and removes what is there after."""
    for name in names:
        (folder / name).write_bytes(_content(data))
    try:
        yield folder / names[0]
    finally:
        # removed, not overwritten: some file systems write a truncated file to the disk at once
        for path in folder.iterdir():
            path.unlink()


def _commands(name: str, *commands: tuple[str, ...]) -> Callable[[Any, Path], None]:
    """Return what writes an input to a file and runs one of the commands on it."""

    def read(data: Any, folder: Path) -> None:
        with _written(folder, name, data=data) as path:
            # by the input, so that one that fails does so again
            command = commands[zlib.crc32(path.read_bytes()) % len(commands)]
            run_command(*(part.replace("FILE", str(path)) for part in command))

    return read


def _content(data: Any) -> bytes:
    """Return an input as the bytes of a file."""
    if isinstance(data, bytes):
        return data
    return json.dumps(data).encode("utf-8", "surrogatepass")


def _refused_or_read(name: str, read: Callable[[Path], Any]) -> Callable[[Any, Any], None]:
    """Return what writes an input to a file and reads that; an error of our own is an answer."""

    def check(data: Any, folder: Path) -> None:
        with _written(folder, name, data=data) as path, contextlib.suppress(RollproofError):
            read(path)

    return check


def _read_case(data: Any, _: Any) -> None:
    with contextlib.suppress(RollproofError):
        Case.from_dict(data)


def _read_model(data: Any, folder: Path) -> None:
    """Both configs of a checkpoint."""
    with _written(folder, "config.json", "generation_config.json", data=data):
        for read in (model_of, end_tokens_of, kv_groups_of):
            with contextlib.suppress(RollproofError):
                read(folder)


def _read_expected(data: Any, folder: Path) -> None:
    """A list that is read can be read again after what fails now was accepted."""
    with (
        _written(folder, "expected.toml", data=data) as path,
        contextlib.suppress(RollproofError),
    ):
        known = ExpectedFailures.read(path)
        verdicts = {"routes.rows": "pass", "stitch.tokens": "fail", "routes.position": "fail"}
        with contextlib.suppress(RollproofError):
            known.accept([Outcome(subject=name, verdicts=verdicts) for name in "ST"])
        try:
            ExpectedFailures.read(path)
        except RollproofError as error:
            raise Broken(f"accepting made the file unreadable: {error}") from error


def _json_file(sound: Any) -> Inputs:
    """Copies of a value in JSON, damaged as a value or as bytes."""
    return one_of(damaged_json(sound), damaged_bytes(json.dumps(sound).encode()))


_GAP = ("gap", "FILE", "--json", "-", "--resamples", "100")
_TARGETS: dict[str, Target] = {
    "trace-json": Target(
        inputs=lambda: damaged_json(_trace_json()),
        read=_commands("t.json", ("check", "FILE"), ("show", "FILE"), ("seal", "FILE")),
    ),
    "trace-bytes": Target(
        inputs=lambda: damaged_bytes(json.dumps(_trace_json()).encode()),
        read=_commands("t.json", ("check", "FILE"), ("show", "FILE"), ("seal", "FILE")),
    ),
    "trace-replay": Target(
        inputs=_damaged_headers,
        read=_commands("t.json", ("replay", "FILE")),
    ),
    "trace-arrow": Target(
        inputs=lambda: damaged_bytes(trace_arrow()),
        read=_commands("t.arrow", ("check", "FILE"), ("show", "FILE")),
    ),
    "trace-scored": Target(
        inputs=lambda: damaged_bytes(trace_arrow()),
        read=_commands("t.arrow", ("gap", "--rollout", "FILE", "--trainer", "score:x")),
    ),
    "report": Target(
        inputs=lambda: _json_file(_report()),
        read=_commands("r.json", ("seal", "FILE"), ("seal", "--check", "FILE"), ("check", "FILE")),
    ),
    "gap-parquet": Target(
        inputs=lambda: damaged_bytes(gap_parquet()), read=_commands("g.parquet", _GAP)
    ),
    "gap-arrow": Target(
        inputs=lambda: damaged_bytes(_gap_arrow()), read=_commands("g.arrow", _GAP)
    ),
    "gap-csv": Target(inputs=lambda: damaged_bytes(_gap_csv()), read=_commands("g.csv", _GAP)),
    "gap-jsonl": Target(
        inputs=lambda: damaged_bytes(_gap_jsonl()), read=_commands("g.jsonl", _GAP)
    ),
    "gap-numpy": Target(inputs=lambda: damaged_bytes(_gap_npz()), read=_commands("g.npz", _GAP)),
    "gap-torch": Target(
        inputs=lambda: damaged_bytes(_gap_torch()), read=_commands("g.pt", _GAP), needs="torch"
    ),
    "gap-limits": Target(
        inputs=lambda: damaged_bytes(_LIMITS),
        read=_refused_or_read("limits.toml", lambda path: limits_named("mine", override=path)),
    ),
    "dump-nemo-rl": Target(
        inputs=lambda: _lines(_NEMO_RL), read=_commands("train_data_step1.jsonl", _GAP)
    ),
    "dump-verifiers": Target(
        inputs=lambda: _lines(_VERIFIERS), read=_refused_or_read("traces.jsonl", read_dump)
    ),
    "dump-skyrl": Target(inputs=lambda: damaged_bytes(_skyrl()), read=_commands("batch.pkl", _GAP)),
    "dump-slime": Target(
        inputs=lambda: damaged_bytes(_slime()),
        read=_refused_or_read("0.pt", read_dump),
        needs="torch",
    ),
    "contract": Target(
        inputs=lambda: _json_file(_contract()),
        read=_refused_or_read("c.json", read_contract),
    ),
    "contract-toml": Target(
        inputs=lambda: damaged_bytes(_CONTRACT_TOML),
        read=_refused_or_read("c.toml", read_contract),
    ),
    "fault-plan": Target(
        inputs=lambda: _json_file(_plan()),
        read=_refused_or_read("plan.json", FaultPlan.from_file),
    ),
    "fault-plan-toml": Target(
        inputs=lambda: damaged_bytes(_PLAN_TOML),
        read=_refused_or_read("plan.toml", FaultPlan.from_file),
    ),
    "case": Target(inputs=lambda: damaged_json(ABORTED.to_dict()), read=_read_case),
    "expected-failures": Target(
        inputs=lambda: damaged_bytes(_EXPECTED.encode()), read=_read_expected
    ),
    "model-config": Target(
        inputs=lambda: one_of(damaged_json(_NESTED_CONFIG), _json_file(_CONFIG)),
        read=_read_model,
    ),
}
_IMPORTS = ("rollproof.gap.html.page", "pyarrow.compute", "pyarrow.json", "pydantic")
FILES = {
    name: replace(target, around=_folder, imports=_IMPORTS) for name, target in _TARGETS.items()
}
