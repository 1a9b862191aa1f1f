"""What the page of a trace draws: calls, marks and requests, as plain values for its script.

Nothing is judged here. Lists by column keep 10,000 requests below a megabyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Abort,
    Call,
    Fault,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Weights,
)
from rollproof.core.records import Version, spread
from rollproof.judging.event_words import (
    describe,
    describe_reply,
    describe_result,
    describe_submit,
    is_aborted,
    named,
    sampled_under,
)

__all__ = ["Drawing", "draw"]

_CALLS = 30_000
"""Calls that a page draws; more would take megabytes, and a screen does not show them."""
_MARKS = 20_000
_TOKENS = 40_000
"""Sampled tokens that a page holds, of the chosen request first."""
_PROMPT = 4_096
_NAME = 200
"""Characters of a name: a hostile one must not fill the page."""
DONE, ABORTED, LOST, OPEN = range(4)


@dataclass(slots=True)
class _Names:
    """Numbers names in the order in which they come."""

    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        """Return the number of a name."""
        return self.numbers.setdefault(name, len(self.numbers))

    @property
    def names(self) -> list[str]:
        """The names by number, each as long as a page shows it."""
        return [name if len(name) <= _NAME else f"{name[:_NAME]}..." for name in self.numbers]


@dataclass(kw_only=True, slots=True)
class _Bar:
    """A call."""

    call: Call
    reply: Reply | None = None
    fault: str = ""

    @property
    def state(self) -> int:
        """How it ended."""
        if self.reply is None:
            return OPEN
        if not self.reply.delivered:
            return LOST
        return ABORTED if is_aborted(self.reply) else DONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """The values for the script of the page.

    data: JSON values.
    left_out: What is not in the page, as sentences.
    """

    data: dict[str, Any]
    left_out: tuple[str, ...]


def draw(
    events: Iterable[Event],
    *,
    chosen: str | None = None,
    story: Sequence[Mapping[str, Any]] = (),
) -> Drawing:
    """Return the drawing of the events of one episode.

    Args:
        events: The events, in order.
        chosen: The request whose tokens come first, and whose calls are marked.
        story: The story of the finding or of the request.
    """
    servers, requests, versions, texts = _Names(), _Names(), _Names(), _Names()
    bars: dict[int, _Bar] = {}
    marks: list[list[Any]] = []
    ends: dict[int, list[Any]] = {}
    first: Event | None = None
    last: Event | None = None
    left = {"calls": 0, "marks": 0}
    for event in events:
        first = first or event
        last = event
        if isinstance(event, Call):
            if len(bars) >= _CALLS:
                left["calls"] += 1
            else:
                bars[event.call_id] = _Bar(call=event)
                servers.of(event.server_id)
        elif isinstance(event, Reply):
            bar = bars.get(event.call_id)
            # a duplicate, or a late reply, changes nothing of the bar
            if bar is not None and bar.reply is None:
                bar.reply = event
        elif isinstance(event, Submit):
            number = requests.of(event.request.request_id)
            text = describe_submit(event).removeprefix(event.request.request_id)
            ends[number] = [event.index, event.time, texts.of(text)]
        elif isinstance(event, Result):
            number = requests.of(event.request_id)
            ends.setdefault(number, [event.index, event.time, texts.of("")])
            if len(ends[number]) == 3:
                ends[number] += [event.index, event.time, texts.of(describe_result(event))]
        elif isinstance(event, Abort | Pause | Resume | Weights | Fault):
            if len(marks) >= _MARKS:
                left["marks"] += 1
                continue
            server = "" if event.server_id is None else event.server_id
            number = servers.of(server) if server else -1
            version = versions.of(named(event.version)) if isinstance(event, Weights) else -1
            marks.append([event.kind, number, event.index, event.time, describe(event), version])
    bounds = [0, 0.0, 1, 1.0]
    if first is not None and last is not None:
        bounds = [first.index, first.time, last.index, last.time]
    tokens, missing = _tokens(bars, chosen)
    data = {
        "servers": servers.names,
        "order": sorted(range(len(servers.names)), key=lambda i: _natural(servers.names[i])),
        "calls": _columns(bars, servers, requests, versions, texts),
        "texts": texts.names,
        "requests": requests.names,
        "ends": [ends.get(number) for number in range(len(requests.names))],
        "versions": versions.names,
        "marks": marks,
        "bounds": bounds,
        "tokens": tokens,
        "chosen": None if chosen is None else requests.numbers.get(chosen),
        "story": [[m["index"], m["time"], m.get("call"), bool(m.get("broke"))] for m in story],
    }
    sentences = [f"{count:,} more {what}" for what, count in left.items() if count]
    if missing:
        sentences.append(f"the tokens of {missing:,} calls")
    return Drawing(data=data, left_out=tuple(sentences))


def _columns(
    bars: Mapping[int, _Bar],
    servers: _Names,
    requests: _Names,
    versions: _Names,
    texts: _Names,
) -> dict[str, list[Any]]:
    """Return the calls, one list a column."""
    columns: dict[str, list[Any]] = {}
    for bar in bars.values():
        call, reply = bar.call, bar.reply
        values: dict[str, Any] = {
            "id": call.call_id,
            "server": servers.of(call.server_id),
            "request": requests.of(call.request_id) if call.request_id else -1,
            "i0": call.index,
            "t0": round(call.time, 6),
            "i1": -1 if reply is None else reply.index,
            "t1": -1 if reply is None else round(reply.time, 6),
            "state": bar.state,
            "prompt": len(call.prompt_ids),
            "sampled": 0 if reply is None else len(reply.output.token_ids),
            "weights": [] if reply is None else _runs(reply, versions),
            "text": texts.of("no reply" if reply is None else _reply_text(reply)),
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return columns


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return what sorts ``s2`` before ``s10``."""
    parts = re.findall(r"\d{1,18}|\D+", name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _reply_text(reply: Reply) -> str:
    weights = sampled_under(reply)
    return f"{describe_reply(reply)}{f' ({weights})' if weights else ''}"


def _runs(reply: Reply, versions: _Names) -> list[int]:
    """Return ``[version, tokens, version, tokens, ...]`` of a reply; version -1 is unknown."""
    count = len(reply.output.token_ids)
    output = reply.output
    if reply.true_tokens is not None:
        of_tokens, word = spread(reply.true_tokens, count), ""
    elif output.spans:
        of_tokens, word = spread(output.spans, count), "tagged "
    else:
        of_tokens, word = [output.version] * count, "tagged "
    runs: list[int] = []
    before: Version = None
    number = -1
    for version in of_tokens:
        if version is None:
            number = -1
        elif version != before or number < 0:
            number = versions.of(f"{word}{version}" if word else named(version))
        before = version
        if runs and runs[-2] == number:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs


def _tokens(bars: Mapping[int, _Bar], chosen: str | None) -> tuple[dict[str, Any], int]:
    """Return ids and logprobs of the sampled tokens by the place of the call in the columns, and of
    how many calls they are left out; of the chosen request the prompts, too.
    """
    out: dict[str, Any] = {}
    left, room = 0, _TOKENS
    ordered = sorted(enumerate(bars.values()), key=lambda item: item[1].call.request_id != chosen)
    for place, bar in ordered:
        if bar.reply is None or not bar.reply.output.token_ids:
            continue
        output = bar.reply.output
        own = bar.call.request_id == chosen
        count = min(len(output.token_ids), room if own else _TOKENS)
        if count > room:
            left += 1
            continue
        room -= count
        ids = [_short(token) for token in output.token_ids[:count]]
        entry: dict[str, Any] = {"ids": ids}
        if output.logprobs is not None:
            entry["logprobs"] = [
                round(float(value), 3) if value == value and abs(value) < 1e30 else None
                for value in output.logprobs[:count]
            ]
        if own:
            entry["prompt"] = [_short(token) for token in bar.call.prompt_ids[:_PROMPT]]
        out[str(place)] = entry
    return out, left


def _short(token: int) -> int | str:
    # beyond this a number of JavaScript is another one
    return token if abs(token) < 2**53 else str(token)
