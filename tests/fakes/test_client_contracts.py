"""Contracts of the reference clients: dtypes, layers and tags that engines and options allow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import ActionKind, Case, Model
from rollproof.core.contract import Filler, LayerAxis, Rows, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Reply, Weights
from rollproof.core.records import FinishReason, Request
from rollproof.fakes.clients.reference_clients import (
    REFERENCES,
    AsSampled,
    ClientOptions,
    EngineKeep,
)
from rollproof.fakes.clients.resuming import finest_tag, tag_fields
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.flavours import VersionTag
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge
from tests.support.client_cases import ABORT, MODEL, act, delivered, ran
from tests.support.engine_driver import spans


@pytest.mark.parametrize(
    ("experts", "options", "dtype"),
    [
        (8, ClientOptions(), "uint8"),
        (300, ClientOptions(), "uint16"),
        (8, ClientOptions(rows=Rows.ALL), "int16"),
        (300, ClientOptions(rows=Rows.ALL), "int32"),
        (8, ClientOptions(rows=Rows.ALL, final_row=Filler.ARANGE), "uint8"),
    ],
)
def test_dtype_is_wide_enough_for_experts_and_filler(
    experts: int, options: ClientOptions, dtype: str
) -> None:
    """Unsigned rows that get a -1 row are widened, never wrapped."""
    trace = ran(partial(AsSampled, options), ABORT(2), model=replace(MODEL, num_experts=experts))
    assert trace.header.contract.dtype == dtype
    routes = delivered(trace).routes
    assert routes is not None
    assert routes.dtype.name == dtype
    assert routes.max() < experts


@pytest.mark.parametrize(
    ("flavour", "axis", "layers"),
    [("trtllm", LayerAxis.ALL, 4), ("vllm", LayerAxis.MOE, 3), ("trtllm", None, 3)],
)
def test_layer_axis_is_converted(flavour: str, axis: LayerAxis | None, layers: int) -> None:
    """A declared axis other than the engine's is computed from it; dense layers contain zeros."""
    rollout = delivered(
        ran(partial(AsSampled, ClientOptions(layer_axis=axis)), ABORT(2), flavour=flavour)
    )
    assert rollout.routes is not None
    assert rollout.routes.shape[1] == layers
    full = CodedPolicy.from_model(MODEL, 0).routes(
        0, (*rollout.prompt_ids, *rollout.response_ids)[:-1]
    )
    np.testing.assert_array_equal(rollout.routes, full if layers == 4 else full[:, 1:])


@pytest.mark.parametrize(
    ("shown", "overtaken", "finest"),
    [
        (VersionTag.SPANS, True, Versions.TOKEN),
        (VersionTag.SPANS_AND_LAST, True, Versions.TOKEN),
        (VersionTag.EMISSION, False, Versions.TOKEN),
        (VersionTag.EMISSION, True, Versions.NONE),
        (VersionTag.ADMISSION, True, Versions.NONE),
        (VersionTag.NONE, False, Versions.NONE),
    ],
)
def test_no_tag_is_declared_that_the_engine_cannot_back(
    shown: VersionTag, overtaken: bool, finest: Versions
) -> None:
    """One label a call is not enough if updates overtake calls."""
    assert finest_tag(Versions.TOKEN, shown, overtaken=overtaken) is finest


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Versions.NONE, {}),
        (Versions.SAMPLE, {"version": 2}),
        (Versions.MIN_MAX, {"min_version": 1, "max_version": 3}),
        (Versions.CALL, {"call_versions": (3, 2)}),
        (Versions.SPAN, {"spans": spans((0, 2, 3), (2, 3, None), (3, 4, 1), (4, 5, 2))}),
        (Versions.TOKEN, {"token_versions": (3, 3, None, 1, 2)}),
    ],
)
def test_tags(kind: Versions, expected: dict[str, Any]) -> None:
    """Each kind of tag of two calls with an answer of the environment between them; versions may go
    back.
    """
    assert tag_fields(kind, [3, 3, None, 1, 2], [1, 1, 0, 1, 1], [3, 2]) == expected


def test_tags_of_nothing() -> None:
    """Without tokens there is no version to name, and version 0 is one."""
    assert tag_fields(Versions.MIN_MAX, [], [], []) == {"min_version": None, "max_version": None}
    assert tag_fields(Versions.MIN_MAX, [0, None], [1, 1], [None]) == {
        "min_version": 0,
        "max_version": 0,
    }
    assert tag_fields(Versions.SAMPLE, [None], [1], [None]) == {"version": None}


def test_updates_that_publish_nothing_leave_tags_unknown() -> None:
    """Tokens of weights without a label have no version, rather than the label of other weights."""
    trace = ran(REFERENCES["as-sampled-tokens"], act(ActionKind.SYNC_UNLABELLED, 2))
    assert delivered(trace).token_versions == (0, 0, None, None, None, None)
    assert [event.label for event in trace if isinstance(event, Weights)] == [0, None]


def test_an_abort_that_keeps_its_rows_back_leaves_no_rows_of_earlier_turns() -> None:
    """A call that is prefilled again after a pause and aborted before its first step: SGLang
    returns tokens without routes.
    """
    request = Request(
        request_id="r0", prompt_ids=(2, 100, 117, 134), max_tokens=11, turns=((117, 134),)
    )
    case = Case(
        flavour="sglang",
        requests=(request,),
        actions=(act(ActionKind.SYNC_FAILS, 8), ABORT(8)),
        seed=2076883414,
        pause_mode=PauseMode.KEEP,
        model=Model(num_layers=6, moe_layers=tuple(range(6)), num_experts=8, top_k=1, eos_every=6),
    )
    trace = run_case(EngineKeep, case)
    replies = [event.output for event in trace if isinstance(event, Reply)]
    assert [True, False] == [output.routes is not None for output in replies]
    assert (FinishReason.ABORT, None) == (delivered(trace).finish_reason, delivered(trace).routes)
    assert () == judge(trace).failed
