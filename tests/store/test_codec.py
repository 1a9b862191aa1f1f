"""Events as JSON values: derived from the records' fields, so that new events and new fields need
no change in the store.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from rollproof.core.error_text import show
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Gauge, Pause, Reply, Weights
from rollproof.core.json_codec import Misfit, from_json, parse_json, to_json
from rollproof.core.records import EngineOutput, Request, Rollout, Version
from rollproof.core.trace import EVENT_KINDS, Header, Trace
from rollproof.errors import TraceError
from rollproof.store import TraceReader, TraceWriter, codec, dump_trace, load_trace
from tests.store.test_arrow_format import HEADER
from tests.support.random_records import alike


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Collated:
    """A record that rollproof does not have."""

    request_ids: tuple[str, ...]
    tokens: npt.NDArray[np.integer[Any]]
    logprobs: npt.NDArray[np.float64] | None = None
    cuts: tuple[tuple[int, ...], ...] = ()
    pair: tuple[int, str] = (0, "")
    versions: tuple[Version, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Collate(Event):
    """An event that rollproof does not have."""

    kind: ClassVar[str] = "collate"
    batch: Collated
    by_layer: dict[int, float]


def test_a_new_kind_of_event_needs_no_code_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event and a record added to the registry make the round trip in both forms."""
    monkeypatch.setitem(EVENT_KINDS, "collate", Collate)
    batch = Collated(
        request_ids=("a", "b"),
        tokens=np.arange(6).reshape(2, 3),
        logprobs=np.array([[0.0, np.nan], [-1.0, -np.inf]]),
        cuts=((), (1, 2), (3,)),
        pair=(7, "x"),
        versions=(1, "mixed", None, 2),
    )
    event = Collate(index=0, time=1.5, batch=batch, by_layer={-1: 0.5, 12: float("nan")})
    trace = Trace(header=HEADER, events=(event,))
    dump_trace(trace, tmp_path / "trace.json")
    with TraceWriter(tmp_path / "trace.arrow", HEADER) as writer:
        writer.append(event)
    assert alike([event], list(load_trace(tmp_path / "trace.json")))
    assert alike([event], list(TraceReader(tmp_path / "trace.arrow")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Unstorable(Event):
    """An event with an ambiguous field."""

    kind: ClassVar[str] = "unstorable"
    which: Request | Rollout


def test_a_record_that_cannot_be_stored_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field type that no trace can hold is refused as a TypeError when the record is first met,
    naming the type.
    """
    monkeypatch.setitem(EVENT_KINDS, "unstorable", Unstorable)
    with pytest.raises(TypeError, match="unions may not contain more than one"):
        codec.encode_event(Unstorable(which=Request(request_id="r", prompt_ids=())))


def test_defaults_of_stored_fields_never_change() -> None:
    """A field that equals its default is left out of a trace, so these defaults are part of schema
    1: a change needs schema 2.
    """
    pinned: dict[type[Any], dict[str, Any]] = {
        Event: {"index": -1, "time": 0.0},
        Request: {
            "max_tokens": None,
            "limit": None,
            "want_logprobs": True,
            "want_routes": True,
            "media": None,
            "group": None,
            "turns": (),
        },
        Call: {
            "media": None,
            "want_routes": True,
            "want_logprobs": True,
            "routes_start": 0,
            "adapter": None,
        },
        EngineOutput: {
            "routes_start": 0,
            "version": None,
            "spans": (),
            "cached_tokens": None,
            "native": "",
            "message": "",
        },
        Reply: {"delivered": True, "duplicate": False, "true_tokens": None, "true_rows": None},
        Pause: {"clear_cache": False, "progress": None},
        Weights: {
            "loaded": True,
            "identity": False,
            "flushed": False,
            "progress": None,
            "adapter": None,
            "base": None,
            "delta_of": None,
            "true_scale": None,
        },
        Rollout: {
            "logprobs": None,
            "loss_mask": None,
            "routes": None,
            "routes_start": 0,
            "version": None,
            "token_versions": None,
        },
        Header: {
            "engine": None,
            "seed": 0,
            "profile": "",
            "coding": None,
            "case": None,
            "recipe": None,
            "made_by": "",
        },
    }
    for cls, defaults in pinned.items():
        actual = {
            field.name: field.default for field in fields(cls) if field.default is not MISSING
        }
        assert defaults == {name: actual.get(name) for name in defaults}


def _header(value: Any) -> Header:
    return Header(subject="x", contract=HEADER.contract, case={"key": value})


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        -1.5,
        "x",
        "$x",
        [],
        {},
        {"$float": 1},
        {"$$": "$"},
        {"a": [1, {"b": float("inf")}]},
        float("nan"),
        2**64 - 1,
    ],
)
def test_free_form_values_come_back(value: Any) -> None:
    """Values that JSON cannot spell, and keys like our own marks, survive in free-form mappings."""
    assert alike({"key": value}, from_json(Header, to_json(_header(value))).case)


def test_free_form_values_are_made_plain() -> None:
    """Tuples become lists and enums their values: the header's case may be passed as
    dataclasses.asdict makes it.
    """
    from rollproof.core.engine_contract import PauseMode

    assert {"mode": "keep", "ids": [1, [2]]} == to_json({"mode": PauseMode.KEEP, "ids": (1, (2,))})


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, object(), {1, 2}, b"x", {"a": object()}])
def test_values_that_are_no_json_are_refused(value: object) -> None:
    """Whole numbers beyond 64 bits, bytes, sets and objects are no JSON values."""
    with pytest.raises(
        Misfit, match=r"^case\['key'\].* must (be a JSON value, not .+|fit 64 bits)"
    ):
        from_json(Header, to_json(_header(value)))


def test_cycles_are_refused(tmp_path: Path) -> None:
    """A header that contains itself is refused rather than followed for ever."""
    case: dict[str, Any] = {}
    case["self"] = case
    with pytest.raises(TraceError, match="The header cannot be stored: it is nested too deeply"):
        TraceWriter(
            tmp_path / "trace.arrow", Header(subject="x", contract=HEADER.contract, case=case)
        )


def test_numpy_scalars_are_stored_as_python_numbers() -> None:
    """A numpy number in a scalar field is stored as the Python number of equal value."""
    encoded = codec.encode_event(Gauge(name="x", value=np.float64(2.5), phase="end"))
    assert {"kind": "gauge", "name": "x", "value": 2.5, "phase": "end"} == encoded
    assert type(encoded["value"]) is float


def test_errors_show_values_short_and_plain() -> None:
    """Hostile values are shown in at most 80 ASCII characters, however large or odd they are."""
    for value in [
        "ü" * 1000,
        "\x1b[31m\u202e",
        10**5000,
        ["x"] * 10**5,
        {"a": 1},
        object(),
        float("nan"),
    ]:
        assert len(show(value)) <= 80 and show(value).isascii() and show(value).isprintable()


def test_duplicate_keys_are_detected_in_linear_time() -> None:
    """A huge object with one key twice is refused as quickly as any other."""
    text = "{" + ",".join(f'"{i}":0' for i in range(200_000)) + ',"7":1}'
    with pytest.raises(TraceError, match="the key '7' occurs twice"):
        parse_json(text)
