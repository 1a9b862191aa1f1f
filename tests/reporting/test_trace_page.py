"""The page of a trace: what is in it, what it needs, and that hostile texts stay texts."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Fault, Pause, Result, Resume
from rollproof.core.records import Span
from rollproof.core.trace import Header, Trace
from rollproof.reporting.html.drawing import draw
from rollproof.reporting.html.route_maps import route_maps
from rollproof.reporting.html.trace_page import (
    OtherFinding,
    ShownFinding,
    TracePage,
    check_page_target,
    page_text,
)
from rollproof.verification.request_views import tell_request
from tests.support.html_pages import HOSTILE, needs_browser, probe, rendered, tags_of
from tests.support.shown_traces import PROMPT, traced
from tests.support.trace_builder import TraceBuilder, contract

pytest.importorskip("jinja2", reason="the page needs rollproof[report]")


def hostile_trace() -> Trace:
    """A trace with the hostile text wherever a trace may have a text."""
    builder = TraceBuilder(contract())
    builder.weights(0, HOSTILE, label=HOSTILE)
    builder.submit(HOSTILE, prompt=PROMPT, group=HOSTILE)
    call = builder.call(PROMPT, request_id=HOSTILE, server=HOSTILE)
    builder.add(
        Pause(server_id=HOSTILE, mode=PauseMode.ABORT),
        Fault(what=HOSTILE, server_id=HOSTILE, detail=HOSTILE),
        Resume(server_id=HOSTILE),
    )
    spans = (Span(start=0, end=2, version=HOSTILE),)
    builder.reply(call, (4, 5), true_tokens=spans, output={"message": HOSTILE, "native": HOSTILE})
    builder.result(request_id=HOSTILE, event={"error": HOSTILE})
    trace = builder.trace()
    return replace(trace, header=replace(trace.header, subject=HOSTILE))


def page_of(
    trace: Trace, request: str, finding: Mapping[str, Any] | None = None, **more: Any
) -> str:
    """The page of a trace about one request."""
    told = tell_request(trace, request)
    assert told is not None
    story = [{"index": m.index, "time": m.time, "text": m.text, "call": m.call} for m in told.story]
    story[-1]["broke"] = True
    shown = None
    if finding is not None:
        shown = ShownFinding(check="routes.rows", promise="Rows are counted.", finding=finding)
    return page_text(
        TracePage(
            **{
                "name": "t.json",
                "header": trace.header,
                "counts": [("events", len(trace.events))],
                "drawing": draw(trace.events, chosen=request, story=story),
                "finding": shown,
                "request": request,
                "story": story,
                "maps": route_maps(told.view, {}),
                **more,
            }
        )
    )


def finding(text: str) -> dict[str, Any]:
    """A finding whose texts are all ``text``."""
    return {
        "title": text,
        "where": {"request": text, text: text},
        "expected": text,
        "observed": text,
        "hint": text,
        "witness": text,
        "flavour": text,
    }


def hostile_page() -> str:
    trace = hostile_trace()
    other = OtherFinding(number=2, check=HOSTILE, title=HOSTILE, times=3)
    return page_of(trace, HOSTILE, finding(HOSTILE), name=HOSTILE, others=[other])


def test_a_page_loads_nothing() -> None:
    """Two scripts, of which one is data, and no address: the page opens from disk, without a
    network, and its policy lets no other script run.
    """
    text = page_of(traced(3), "r1")
    tags = tags_of(text)

    assert 2 == tags.scripts
    assert [] == tags.addresses
    assert set() == tags.tags & {"link", "img", "iframe", "object", "image", "base", "form"}
    assert "@import" not in text and "url(" not in text
    assert len(set(tags.ids)) == len(tags.ids)
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_hostile_texts_add_no_element() -> None:
    """In every field of a trace and of a finding: as many scripts as any page, no image."""
    tags = tags_of(hostile_page())
    assert 2 == tags.scripts
    assert "img" not in tags.tags


def test_the_story_needs_no_script() -> None:
    """The finding, its place and its story are in the HTML itself, the mark in words."""
    text = page_of(traced(3), "r1", finding("3 rows"))
    assert "<b>broken here:</b> r1 delivered: 4 tokens" in text
    assert "FAIL" in text and "Rows are counted." in text
    assert "rollproof replay &#39;3 rows&#39; --trust-subject" in text


def test_colours_have_two_schemes() -> None:
    """Each variable that the page uses has a value for light and one for dark."""
    text = page_of(traced(1), "r0")
    light, dark = (
        set(re.findall(r"--(\w+):", part.group(1)))
        for pattern in (r":root \{(.*?)\}", r"dark\) \{\s*:root \{(.*?)\}")
        if (part := re.search(pattern, text, flags=re.DOTALL)) is not None
    )
    used = set(re.findall(r"(?:var\(|\")--(\w+)", text)) - {"font", "events", "times"}
    assert used <= light & dark


def test_ten_thousand_requests_fit() -> None:
    """The page stays near two megabytes; of the tokens those of the chosen request come first, and
    the page says what is not in it.
    """
    builder = TraceBuilder(contract())
    for number in range(10_000):
        name = f"r{number}"
        builder.submit(name)
        builder.reply(builder.call((1, 2), request_id=name), range(20))
        builder.result(range(20), name)
    trace = builder.trace()
    drawing = draw(trace.events, chosen="r9999")
    header = Header(subject="many", contract=contract())
    text = page_text(TracePage(name="t", header=header, counts=[], drawing=drawing))

    assert len(text) < 2_400_000
    assert 10_000 == len(drawing.data["calls"]["id"])
    assert {"9999"} <= drawing.data["tokens"].keys()
    assert "the tokens of 8,000 calls" in drawing.left_out[0]


def test_more_calls_than_a_page_draws_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out silently."""
    monkeypatch.setattr("rollproof.reporting.html.drawing._CALLS", 3)
    drawing = draw(traced(4).events)
    assert 3 == len(drawing.data["calls"]["id"])
    assert "5 more calls" in drawing.left_out


def test_calls_are_drawn_as_they_ended() -> None:
    """State, weights, and texts of each call; a call without a reply is open."""
    trace = traced(1)
    calls = draw(trace.events[:-3]).data
    columns = calls["calls"]
    assert [1, 3] == columns["state"]
    assert [[0, 2], []] == columns["weights"]
    assert ["v0"] == calls["versions"]
    assert ["s0", "s1"] == [calls["servers"][number] for number in columns["server"]]
    assert "sampled 2 tokens, 4 route rows, aborted (v0)" == calls["texts"][columns["text"][0]]


def test_tags_are_not_taken_for_weights() -> None:
    """Where only the engine's tag is known, a colour stands for the tag."""
    builder = TraceBuilder(contract())
    builder.submit()
    builder.reply(builder.call((1, 2)), (4, 5), version=3, true_tokens=None)
    assert ["tagged 3"] == draw(builder.trace().events).data["versions"]


def test_servers_are_in_natural_order() -> None:
    """s2 comes before s10."""
    builder = TraceBuilder(contract())
    for server in ("s10", "s2", "s1"):
        builder.call((1,), server=server)
    data = draw(builder.trace().events).data
    assert ["s1", "s2", "s10"] == [data["servers"][number] for number in data["order"]]


def test_long_names_stay_apart() -> None:
    """Two servers whose names begin alike are two lanes, each with a name that fits."""
    builder = TraceBuilder(contract())
    for end in "ab":
        builder.call((1,), server="s" * 1000 + end)
    data = draw(builder.trace().events).data
    assert [0, 1] == data["calls"]["server"]
    assert [203, 203] == [len(name) for name in data["servers"]]


def test_maps_show_what_differs() -> None:
    """Expected are the rows of the reference stitch; a shifted sample differs at each position that
    shows it, and equal routes have no map.
    """
    trace = traced(2, shifted=[1])
    right, shifted = tell_request(trace, "r0"), tell_request(trace, "r1")
    assert right is not None and shifted is not None
    assert route_maps(right.view, {}) is None
    maps = route_maps(shifted.view, {"position": 2, "layer": 1})
    assert maps is not None
    assert list(range(6)) == maps["positions"]
    assert [True] * 6 == maps["wrong"]
    assert maps["expected"][:-1] == maps["observed"][1:]


def test_rows_behind_the_last_are_wrong() -> None:
    """A row too many has no expected one; the filler of a contract with T rows is not wrong."""
    trace = traced(1)
    result = trace.events[-1]
    assert isinstance(result, Result) and result.rollout is not None
    routes = result.rollout.routes
    assert routes is not None
    more = np.concatenate([routes, routes[:1]])
    longer = replace(result, rollout=replace(result.rollout, routes=more))
    events = (*trace.events[:-1], longer)
    wrong = []
    for rows in ("T-1", "T"):
        changes = {} if rows == "T-1" else {"final_row": "zeros"}
        header = replace(trace.header, contract=contract(rows=rows, **changes))
        told = tell_request(Trace(header=header, events=events), "r0")
        assert told is not None
        maps = route_maps(told.view, {})
        wrong.append(None if maps is None else maps["wrong"])
    assert [[False] * 6 + [True], None] == wrong


def test_a_page_without_jinja2_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the trace is read."""
    from rollproof.errors import ExtraError

    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ExtraError, match=r"needs jinja2, which is not installed: pip install"):
        check_page_target(tmp_path / "t.html")


@needs_browser
def test_hostile_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    """In a browser, with every panel open: no script of a trace runs, no element of it appears, and
    its texts are read as they are.
    """
    actions = """
      const find = document.getElementById("find");
      find.value = "script"; find.dispatchEvent(new Event("input"));
      const links = document.querySelectorAll("#call button").length;
      document.querySelector("#call button").click();
      const panel = document.getElementById("call");
      [...panel.querySelectorAll("button")].pop().click();
      return { title: document.title, images: document.images.length, links,
        scripts: document.scripts.length, panel: panel.textContent,
        legend: document.getElementById("legend").textContent,
        heading: document.querySelector("h1").textContent,
        tokens: panel.querySelectorAll(".tokens span").length };
    """
    found = probe(rendered(tmp_path, hostile_page(), actions))

    assert f"routes.rows: {HOSTILE}" == found["title"]
    assert (0, 3, 1) == (found["images"], found["scripts"], found["links"])
    assert HOSTILE == found["heading"]
    assert HOSTILE in found["panel"]
    assert HOSTILE[:40] in found["legend"]
    assert 3 + 2 == found["tokens"]


@needs_browser
def test_a_phone_shows_all_without_sideways_scrolling(tmp_path: Path) -> None:
    """At 390 px no part of the page is wider than the screen but what scrolls by itself; maps are
    below each other, and a tapped cell says its experts.
    """
    trace = traced(2, shifted=[1])
    actions = """
      const board = document.getElementById("observed");
      const tap = new MouseEvent("click", { bubbles: true });
      Object.defineProperty(tap, "offsetX", { value: 40 });
      Object.defineProperty(tap, "offsetY", { value: 25 });
      board.dispatchEvent(tap);
      return { wide: document.documentElement.scrollWidth, screen: innerWidth,
        cell: document.getElementById("cell").textContent,
        tops: ["expected", "observed"].map(
          (id) => document.getElementById(id).getBoundingClientRect().top) };
    """
    found = probe(rendered(tmp_path, page_of(trace, "r1", finding("rows")), actions))

    assert found["wide"] <= found["screen"]
    assert found["tops"][0] < found["tops"][1]
    assert found["cell"].startswith("position 0, layer 0: expected experts ")
    assert "; observed experts " in found["cell"]
