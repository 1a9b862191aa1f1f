"""Every leaf of a file has the type that its field declares: another is refused, with its place.

A value of a wrong type that is read would be compared with sound ones, and decide a verdict.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollproof.contracts.contract_file import read_contract
from rollproof.core.batch_columns import Column
from rollproof.core.case import Case
from rollproof.core.contract import Adapters
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Weights
from rollproof.core.events.weights import Adapter, AdapterChange, Checksums
from rollproof.errors import RollproofError
from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.known_bugs._planting import ABORTED
from rollproof.store import dump_trace, load_trace
from rollproof.verification.runner import run_case
from rollproof.verification.traces import oracle_of

_VALUES: Mapping[str, Any] = {
    "null": None,
    "bool": True,
    "int": 7,
    "float": 1.5,
    "text": "text",
    "list": [],
    "object": {},
}
_VERSION = {"text", "null"}

_CASE: Mapping[str, set[str]] = {
    "actions.*.server": {"text"},
    "deadline": {"int"},
    "engine.kv_tokens": {"int"},
    "engine.max_length": {"int"},
    "engine.prefill_chunk": {"int"},
    "engine.step": {"int"},
    "model.eos_every": {"int"},
    "requests.*.group": {"text"},
    "requests.*.limit": {"int"},
    "requests.*.max_length": {"int"},
    "requests.*.max_tokens": {"null"},
    "requests.*.media": {"text"},
}
"""What a field may hold that holds something else in the sound document."""
_TRACE: Mapping[str, set[str]] = {
    "events.*.adapter": {"null"},
    "events.*.base": _VERSION,
    "events.*.delta_of": _VERSION,
    "events.*.label": _VERSION,
    "events.*.max_tokens": {"null"},
    "events.*.output.cached_tokens": {"null"},
    "events.*.output.logprobs.data.*": {"int"},
    "events.*.output.spans.*.version": _VERSION,
    "events.*.request.max_tokens": {"null"},
    "events.*.rollout.finish_reason": {"null"},
    "events.*.rollout.logprobs.data.*": {"int"},
    "events.*.rollout.max_version": _VERSION,
    "events.*.rollout.min_version": _VERSION,
    "events.*.time": {"int"},
    "events.*.true_draw": {"null"},
    "events.*.true_rows.*.version": _VERSION,
    "events.*.true_scale": {"null", "int"},
    "events.*.true_tokens.*.version": _VERSION,
    "events.*.value": {"int"},
    "events.*.version": _VERSION,
    "header.coding.eos_every": {"int"},
    "header.contract.adapters": {"null"},
    "header.contract.columns.*.filler": {"null", "int"},
    "header.contract.partial_off": {"null"},
    "header.contract.sampling": {"null"},
    # whatever the subject returned
    "events.*.rollout.extra.attempts": {"text", "float", "null", "bool"},
    "events.*.rollout.extra.turns": {"text", "float", "null", "bool"},
    # read by `replay`, which looks the name up
    "header.recipe.reference": {"float", "int", "list", "null", "bool", "object"},
    **{f"header.case.{name}": types for name, types in _CASE.items()},
}
_PLAN: Mapping[str, set[str]] = {
    "faults.*.probability": {"null"},
    "faults.*.request_id": {"null"},
    "faults.*.seconds": {"int"},
    "faults.*.times": {"null"},
}
_CONTRACT: Mapping[str, set[str]] = {
    "adapters": {"null"},
    "columns.*.filler": {"null", "int"},
    "limits.length": {"null"},
    "limits.turns": {"null"},
}


_MORE_EVENTS: Sequence[Event] = (
    Weights(server_id="s0", version=1, label=1, adapter="policy", base=0, true_scale=1.5),
    Weights(server_id="s0", version=2, label=2, delta_of=1),
    Adapter(
        server_id="s0", name="policy", change=AdapterChange.RELOADED, version=1, true_scale=1.5
    ),
    Checksums(version=1, digests={"layers.0": "1f"}, adapter="policy"),
)
"""Events of adapters, deltas and checksums, which the first reference does not have."""


def _trace(folder: Path) -> Any:
    name, factory = next(iter(REFERENCES.items()))
    path = folder / "sound.json"
    trace = run_case(factory, ABORTED, recipe={"reference": name})
    last = trace.events[-1]
    more = tuple(
        replace(event, index=last.index + i, time=last.time)
        for i, event in enumerate(_MORE_EVENTS, start=1)
    )
    contract = replace(
        trace.header.contract,
        columns=(Column(name="values", filler=0.5),),
        adapters=Adapters.MOVING_BASE,
    )
    header = replace(trace.header, contract=contract)
    dump_trace(replace(trace, header=header, events=(*trace.events, *more)), path)
    data = json.loads(path.read_bytes())
    del data["checksum"]
    return data


def _read_trace(data: Any, folder: Path) -> None:
    path = folder / "trace.json"
    path.write_text(json.dumps(data))
    oracle_of(load_trace(path).header)


def _read_contract(data: Any, folder: Path) -> None:
    path = folder / "contract.json"
    path.write_text(json.dumps(data))
    read_contract(path)


def _contract(_: Path) -> Any:
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
        "multi_turn": True,
        "limits": {"length": 4096, "turns": 4},
        "columns": [{"name": "values", "extent": "tokens", "filler": 0.5, "dtype": "float32"}],
        "adapters": "frozen-base",
    }


def _plan(_: Path) -> Any:
    status = {"do": "status", "path": "/v1/*", "status": 500, "after_engine": True, "times": 2}
    return {
        "seed": 3,
        "faults": [
            {"do": "truncate", "path": "/generate", "nth": [2], "keep": 0.5},
            {"do": "slow", "seconds": 1.5, "probability": 0.25, "request_id": "r0"},
            status,
        ],
        "actions": [{"do": "abort", "when": {"request": "r1", "tokens": 2}}],
    }


@pytest.mark.parametrize(
    ("sound", "read", "accepted"),
    [
        pytest.param(_trace, _read_trace, _TRACE, id="trace"),
        pytest.param(
            lambda _: ABORTED.to_dict(), lambda data, _: Case.from_dict(data), _CASE, id="case"
        ),
        pytest.param(_contract, _read_contract, _CONTRACT, id="contract"),
        pytest.param(
            _plan,
            lambda data, _: FaultPlan.from_dict(data),
            _PLAN,
            id="plan",
        ),
    ],
)
def test_a_leaf_of_a_wrong_type_is_refused_by_name(
    sound: Callable[[Path], Any],
    read: Callable[[Any, Path], None],
    accepted: Mapping[str, set[str]],
    tmp_path: Path,
) -> None:
    """Each leaf, with a value of each other type: an error of ours that names the field, but for
    what the field's declaration allows.
    """
    document = sound(tmp_path)
    read(document, tmp_path)
    taken: dict[str, set[str]] = {}
    unnamed: list[str] = []
    for path in _leaves(document):
        for kind, value in _VALUES.items():
            damaged, before = _changed(document, path, value)
            if type(before) is type(value):
                continue
            place = ".".join("*" if isinstance(step, int) else step for step in path)
            try:
                read(damaged, tmp_path)
            except RollproofError as error:
                field = [step for step in path if isinstance(step, str) and step != "data"][-1]
                unnamed += [] if field in str(error) else [f"{place}: {error}"]
            else:
                taken.setdefault(place, set()).add(kind)

    assert (accepted, []) == (taken, unnamed)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each leaf; of equal kinds of a place in a list only the first."""
    if not isinstance(value, dict | list):
        yield path
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    seen: set[str] = set()
    for key, inner in items:
        if isinstance(value, list):
            form = _form(inner)
            if form in seen:
                continue
            seen.add(form)
        yield from _leaves(inner, (*path, key))


def _form(value: Any) -> str:
    """Return what two values of a list have in common if their leaves are of the same fields."""
    if isinstance(value, dict):
        return f"{value.get('kind')} {sorted((key, _form(value[key])) for key in value)}"
    if isinstance(value, list):
        return f"list of {sorted({_form(item) for item in value})}"
    return type(value).__name__


def _changed(document: Any, path: tuple[Any, ...], value: Any) -> tuple[Any, Any]:
    """Return a copy with another value at a place, and what was there."""
    damaged = copy.deepcopy(document)
    *above, key = path
    parent = damaged
    for step in above:
        parent = parent[step]
    before, parent[key] = parent[key], value
    return damaged, before


def test_a_policy_that_was_read_before_excuses_no_other_type(tmp_path: Path) -> None:
    """``True`` equals 1, and policies are kept: the second trace is refused all the same."""
    data = _trace(tmp_path)
    data["header"]["coding"]["seed"] = 1
    _read_trace(data, tmp_path)
    data["header"]["coding"]["seed"] = True
    with pytest.raises(RollproofError, match="seed"):
        _read_trace(data, tmp_path)
