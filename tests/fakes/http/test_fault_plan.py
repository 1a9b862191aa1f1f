"""Fault plans: what is read, what is refused, and what a client on a socket meets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollproof.core.case import ActionKind
from rollproof.core.events.rollout import Fault, Reply
from rollproof.errors import UsageError
from rollproof.fakes.http.fault_plan import (
    FaultPlan,
    PlanProgress,
    WireFault,
    WireFaultKind,
    plan_summary,
)
from tests.fakes.http.served import served

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}


def plan(**fault: Any) -> FaultPlan:
    return FaultPlan.from_dict({"faults": [fault]})


def test_a_plan_is_read_from_toml_and_json(tmp_path: Path) -> None:
    """Both forms give the same plan."""
    toml, text = tmp_path / "plan.toml", tmp_path / "plan.json"
    toml.write_text(
        'seed = 3\n[[faults]]\ndo = "reset"\npath = "/generate"\nnth = [2]\n'
        '[[actions]]\ndo = "abort"\nwhen = {request = "r1", tokens = 2}\n'
    )
    data = {
        "seed": 3,
        "faults": [{"do": "reset", "path": "/generate", "nth": [2]}],
        "actions": [{"do": "abort", "when": {"request": "r1", "tokens": 2}}],
    }
    text.write_text(json.dumps(data))
    assert FaultPlan.from_file(toml) == FaultPlan.from_file(text)
    assert ActionKind.ABORT is FaultPlan.from_file(toml).actions[0].do


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"fault": []}, "has no \\['fault'\\]"),
        ({"faults": {}}, r"faults must be a list of tables: in TOML one \[\[faults\]\] for each"),
        (
            {"faults": [{"do": "status", "after_engine": 1}]},
            "after_engine=1 must be true or false",
        ),
        ({"faults": [{}]}, "Fault 1 needs 'do'; its fields are \\['after_engine', 'do'"),
        (
            {"faults": [{"do": "explode"}]},
            (
                "do='explode' must be one of \\['reset', 'slow', 'status', 'truncate',"
                " 'wrong-length'\\]\\.$"
            ),
        ),
        ({"faults": [{"do": "truncat"}]}, "Did you mean 'truncate'\\?"),
        ({"faults": [{"do": "reset", "nht": [1]}]}, "Fault 1 has no field 'nht'; its fields are"),
        (
            {"faults": [{"do": "reset", "nth": [0]}]},
            "Fault 1 cannot be planned:\n  - nth=\\[0\\] must be whole numbers from 1",
        ),
        ({"faults": [{"do": "reset", "nth": []}]}, "Fault 1: nth=\\[\\] names no request"),
        (
            {"faults": [{"do": "reset", "nth": [1], "probability": 0.5}]},
            "nth and probability exclude each other",
        ),
        (
            {"faults": [{"do": "reset", "seconds": 2}]},
            r"Fault 1 \(reset\): seconds is only for slow",
        ),
        (
            {"faults": [{"do": "slow", "seconds": 1, "keep": 0.1}]},
            "keep is only for reset and truncate and wrong-length",
        ),
        ({"faults": [{"do": "reset", "probability": 2}]}, "a number from 0 to 1"),
        ({"faults": [{"do": "status", "status": 200}]}, "a status from 400 to 599"),
        ({"faults": [{"do": "slow", "seconds": -1}]}, "a number from 0 to 3600"),
        (
            {"faults": [{"do": "slow"}]},
            "Fault 1 cannot be planned:\n  - do = 'slow' needs seconds, such as 2.5",
        ),
        ({"faults": [{"do": "truncate", "keep": 1.0}]}, "below 1"),
        ({"faults": [{"do": "reset", "path": "generate"}]}, "must be a path"),
        (
            {"actions": [{"do": "skew", "when": {"request": "r", "tokens": 1}}]},
            "must be one of .*A server does no other by itself",
        ),
        ({"actions": [{"do": "abort"}]}, "Action 1 needs 'when'; its fields are"),
        ({"actions": [{"do": "abort", "when": 3}]}, "when=3 must be a table, such as"),
        (
            {"actions": [{"do": "abort", "when": {"request": "r"}}]},
            "'when' of action 1 needs 'tokens'",
        ),
        (
            {"actions": [{"do": "abort", "when": {"request": "r", "tokens": 1, "x": 2}}]},
            "'when' of action 1 has no field 'x'",
        ),
        (
            {"actions": [{"do": "abort", "when": {"request": "r", "tokens": "1"}}]},
            "when.tokens='1' must be a whole number from 0",
        ),
        (
            {"actions": [{"do": "kill", "server": 1, "when": {"request": "r", "tokens": 1}}]},
            "server=1 must be a text",
        ),
        (
            {"actions": [{"do": "abortt", "when": {"request": "r", "tokens": 1}}]},
            "Did you mean 'abort'",
        ),
        ({"seed": "x"}, "seed='x' must be a whole number"),
    ],
)
def test_an_invalid_plan_is_refused_with_the_reason(data: dict[str, Any], words: str) -> None:
    """One line that names the fault and the field."""
    with pytest.raises(UsageError, match=words):
        FaultPlan.from_dict(data)


def test_an_unreadable_plan_is_refused(tmp_path: Path) -> None:
    """A missing file and one that is no TOML."""
    broken = tmp_path / "plan.toml"
    broken.write_text("[[faults")
    for path in (broken, tmp_path / "absent.toml"):
        with pytest.raises(UsageError, match="cannot be read"):
            FaultPlan.from_file(path)


def hit_by(a_plan: FaultPlan, requests: list[tuple[str, bytes]]) -> list[int]:
    faults = PlanProgress(a_plan, lambda _fault, _path: None)
    return [
        number
        for number, (path, body) in enumerate(requests, 1)
        if faults.due(path, body) is not None
    ]


def test_a_fault_befalls_whom_it_names() -> None:
    """The n-th of those that fit its path, those of an id, those drawn (the same with the same
    seed, others with another).
    """
    mixed = [("/generate" if i % 2 else "/health", b'{"rid": "r%d"}' % i) for i in range(40)]
    assert [4, 8] == hit_by(plan(do="reset", path="/generate", nth=[2, 4]), mixed)
    assert [6] == hit_by(plan(do="reset", request_id="r5"), mixed)
    again = [("/generate", b'{"rid": "r1"}'), ("/generate", b'{"rid": "r2"}')] * 3
    assert [3] == hit_by(
        plan(do="reset", request_id="r1", nth=[2]), again
    )  # the second of its own calls, whoever calls in between
    assert [1, 2] == hit_by(plan(do="reset", times=2), mixed)
    drawn = [
        FaultPlan(
            faults=(WireFault(do=WireFaultKind.SLOW, seconds=1.0, probability=0.3),), seed=seed
        )
        for seed in (1, 1, 2)
    ]
    first, again, other = (hit_by(a_plan, mixed) for a_plan in drawn)
    assert first == again != other
    assert 0 < len(first) < 40


def test_the_summary_of_a_plan_is_printed() -> None:
    """Of all servers together: a fault that nothing fitted and an action that never fired are
    reported apart from those that happened.
    """
    full_plan = FaultPlan.from_dict(
        {
            "faults": [
                {"do": "reset", "path": "/generate", "nth": [2]},
                {"do": "slow", "seconds": 1, "request_id": "nobody"},
            ],
            "actions": [
                {"do": "abort", "when": {"request": name, "tokens": 2}}
                for name in ("r1", "r1", "r2")
            ],
        }
    )
    servers = [PlanProgress(full_plan, lambda _fault, _path: None) for _ in range(2)]
    for server in servers:
        for _ in range(3):
            server.due("/generate", b"{}")
    assert [
        "fault 1 (reset): applied to 2 of 6 requests to /generate",
        "fault 2 (slow): applied to 0 of 0 requests with the id 'nobody'",
        "action 1 (abort of 'r1' at 2 tokens): happened",
        "action 2 (abort of 'r1' at 2 tokens): did not happen: 'r1' did not get that far",
        "action 3 (abort of 'r2' at 2 tokens): happened",
    ] == list(plan_summary(full_plan, [*servers, None], full_plan.actions[:1]))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"do": "reset"}, (httpx.ReadError, httpx.RemoteProtocolError)),
        ({"do": "truncate"}, (httpx.RemoteProtocolError,)),
        ({"do": "truncate", "stream": True}, (httpx.RemoteProtocolError,)),
        ({"do": "reset", "stream": True}, (httpx.ReadError, httpx.RemoteProtocolError)),
    ],
)
def test_a_broken_connection_is_an_error_of_the_client(
    fault: dict[str, Any], error: tuple[type[Exception], ...]
) -> None:
    """A reset, and a body shorter than declared, of a reply and of a stream; the trace says that
    nobody received the reply.
    """
    stream = fault.pop("stream", False)
    with served("sglang", plan=plan(path="/generate", nth=[1], **fault)) as server:
        with pytest.raises(error):
            server.client.post("/generate", json={**BODY, "stream": stream})
        assert 200 == server.client.post("/generate", json=BODY).status_code
        events = server.do(lambda: server.backend.recorder.events)
    assert [False, True] == [event.delivered for event in events if isinstance(event, Reply)]
    assert ["lost-reply"] == [event.what for event in events if isinstance(event, Fault)]


def test_a_wrong_length_is_no_error_of_the_client_but_half_a_body() -> None:
    """The HTTP library is content; the JSON is not. A stream ends in order and without its mark."""
    with served("sglang", plan=plan(do="wrong-length", path="/generate", nth=[1, 2])) as server:
        with pytest.raises(ValueError, match=r"Unterminated|Expecting|delimiter"):
            server.client.post("/generate", json=BODY).json()
        text = server.client.post("/generate", json={**BODY, "stream": True}).text
    assert "data: " in text
    assert "[DONE]" not in text


@pytest.mark.parametrize(("after", "calls"), [(False, 0), (True, 1)])
def test_a_status_comes_before_the_engine_or_after_it(after: bool, calls: int) -> None:
    """After the engine it has sampled tokens that nobody gets; before, it knows nothing."""
    with served("vllm", plan=plan(do="status", status=502, nth=[1], after_engine=after)) as server:
        reply = server.client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
        events = server.do(lambda: server.backend.recorder.events)
    assert 502 == reply.status_code
    assert calls == sum(isinstance(event, Reply) for event in events)
    assert ["lost-reply" if after else "reject"] == [
        event.what for event in events if isinstance(event, Fault)
    ]


def test_a_slow_reply_is_late_and_undelivered_if_its_client_left() -> None:
    """The engine takes the time, so that the trace is right about whoever gives up."""
    with served("sglang", plan=plan(do="slow", seconds=0.5, nth=[1, 2])) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/generate", json=BODY, timeout=0.2)
        reply = server.client.post("/generate", json=BODY)
        events = server.do(lambda: server.backend.recorder.events)
    assert reply.elapsed.total_seconds() >= 0.5
    assert [False, True] == [event.delivered for event in events if isinstance(event, Reply)]


def test_the_engine_carries_out_actions_of_its_own() -> None:
    """An abort after the second token of a request, by the id of its call."""
    actions = {"actions": [{"do": "abort", "when": {"request": "r1", "tokens": 2}}]}
    with served("sglang", plan=FaultPlan.from_dict(actions)) as server:
        meta = server.client.post("/generate", json={**BODY, "rid": "r1"}).json()["meta_info"]
        other = server.client.post("/generate", json={**BODY, "rid": "r2"}).json()["meta_info"]
    assert ("abort", 2, "length") == (
        meta["finish_reason"]["type"],
        meta["completion_tokens"],
        other["finish_reason"]["type"],
    )


def test_a_request_is_selected_by_the_header_that_names_it() -> None:
    """As the actions of a plan find it: a stack need not send a handle of its own."""
    with served("sglang", plan=plan(do="status", status=503, request_id="mine")) as server:
        statuses = [
            httpx.post(
                f"{server.url}/generate",
                json=BODY,
                headers={} if name is None else {"x-rollproof-request": name},
            ).status_code
            for name in (None, "other", "mine", None)
        ]
    assert [200, 200, 503, 200] == statuses
