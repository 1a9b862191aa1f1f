"""Writes docs/api.md: what a subject is coded against, from docstrings and signatures, and how the
engine flavours answer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

import rollproof
from rollproof.fakes.engine import exceptions
from rollproof.fakes.engine.flavours import FLAVOURS, Flavour, PausedCalls, VersionTag

__all__ = ["api_page"]

_RECORDS = (
    rollproof.Request,
    rollproof.Rollout,
    rollproof.EngineOutput,
    rollproof.Span,
    rollproof.FinishReason,
    rollproof.PauseMode,
)
_FLEET = (
    "engine_contract",
    "kv_policy",
    "ray_handles",
    "sync",
    "next_version",
    "weights_of",
    "gauges",
)
_ENGINE = (
    "version",
    "label",
    "paused",
    "generate",
    "abort",
    "pause",
    "resume",
    "load",
    "load_now",
    "relabel",
    "reset_prefix_cache",
)
_RECORDING = (
    "rollout",
    "engine",
    "submit",
    "result",
    "observation",
    "weights",
    "pause",
    "resume",
    "abort",
    "recorded",
    "report",
)

_SHOWN = {
    VersionTag.NONE: "nowhere",
    VersionTag.EMISSION: "`out.version`, read when it answers",
    VersionTag.ADMISSION: "`out.version`, read when the call was admitted",
    VersionTag.SPANS: "`out.spans`",
    VersionTag.SPANS_AND_LAST: "`out.spans`; `out.version` is that of the last token",
}
_PAUSED = {
    PausedCalls.PARK: "wait",
    PausedCalls.REJECT: "an abort without tokens",
    PausedCalls.RAISE: "`EnginePaused`",
}


def api_page() -> Iterator[str]:
    """docs/api.md."""
    yield (
        "# API\n\nWhat a subject of your own is coded against. `help(rollproof.Rollout)` says the"
        " same in a Python prompt; names without"
    )
    yield (
        "a module are those of `rollproof`. [contract.md](contract.md) has the fields of the"
        " `Contract`.\n"
    )
    yield "## What you write"
    yield from _class(
        rollproof.RolloutSubject, ("start", "rollout", "update_weights", "to_record", "stop")
    )
    yield from _class(rollproof.BatchSubject, ("collate", "rows"))
    yield "\n## What it is handed, and hands over"
    for record in _RECORDS:
        yield from _class(record, ("budget",) if record is rollproof.Request else ())
    yield "\n## The fake servers"
    yield from _class(
        rollproof.Fleet,
        _FLEET,
        "`fleet.servers` maps ids to `FakeEngine`; `fleet.case` is the `Case` that runs.",
    )
    yield from _class(rollproof.FakeEngine, _ENGINE)
    yield (
        "\n### What they raise\n\nOf `rollproof.fakes.engine.exceptions`; each is below the builtin"
        " that a real client raises.\n"
    )
    for name in exceptions.__all__:
        error = getattr(exceptions, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        yield f"- `{name}` ({bases}): {_text(error)}"
    yield from _flavours()
    yield "\n## Running it"
    for function in (rollproof.run_conformance, rollproof.conformance, rollproof.record):
        yield from _function(
            function, function.__name__, level=3, title=f"rollproof.{function.__name__}"
        )
    yield from _class(rollproof.EngineCall)
    yield from _class(rollproof.Recording, _RECORDING)
    yield from _function(rollproof.lend, "lend", level=3, title="rollproof.lend")


def _flavours() -> Iterator[str]:
    yield (
        "\n## Engine flavours\n\nA subject's `flavours` name those that it speaks; `out` is the"
        " `EngineOutput` of a call.\n"
    )
    yield (
        "| flavour | rows | layer axis | dtype | version of the weights | logprobs | an empty abort"
        " carries | a call while paused |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for one in FLAVOURS.values():
        cells = (
            f"`{one.name}`",
            f"`{one.rows}`",
            f"`{one.layer_axis}`",
            _dtypes(one),
            _SHOWN[one.version_tag],
            f"`{one.logprobs}`",
            _empty_abort(one),
            _PAUSED[one.paused_calls],
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    for one in FLAVOURS.values():
        yield f"- `{one.name}`: {one.source}"


def _dtypes(flavour: Flavour) -> str:
    if len(flavour.dtypes) == 1:
        return f"`{flavour.dtypes[0][1]}`"
    return ", ".join(f"`{name}` up to {largest} experts" for largest, name in flavour.dtypes)


def _empty_abort(flavour: Flavour) -> str:
    parts = ["no rows", "logprobs of length 0" if flavour.empty_logprobs else "`logprobs=None`"]
    if flavour.version_tag is VersionTag.SPANS_AND_LAST:
        parts.append("one empty span")
    return ", ".join(parts)


def _class(cls: type, members: tuple[str, ...] = (), more: str = "") -> Iterator[str]:
    yield f"\n### {cls.__name__}\n\n{_text(cls)}"
    if more:
        yield f"\n{more}"
    if issubclass(cls, Enum):
        yield f"\nValues: {', '.join(f'`{member.value}`' for member in cls)}."
    if is_dataclass(cls):
        yield "\n| field | type | default |\n|---|---|---|"
        for field in fields(cls):
            yield f"| `{field.name}` | `{_escaped(str(field.type))}` | {_default(field)} |"
    for name in members:
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            assert member.fget is not None
            kind = f": {member.fget.__annotations__['return']}"
            yield f"\n#### {cls.__name__}.{name}\n\n`{name}{kind}`\n\n{_text(member)}"
        else:
            yield from _function(member, name, level=4, title=f"{cls.__name__}.{name}")


def _function(function: Callable[..., Any], name: str, *, level: int, title: str) -> Iterator[str]:
    yield f"\n{'#' * level} {title}\n\n```python\n{_signature(function, name)}\n```"
    if function.__doc__:
        yield f"\n{_text(function)}"


def _signature(function: Callable[..., Any], name: str) -> str:
    """The call, without ``self``; one parameter a line where it is long."""
    signature = inspect.signature(function)
    shown = [
        (
            one.replace(annotation=_Bare(one.annotation), default=_bare(one.default))
            if one.annotation is not one.empty
            else one
        )
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    keyword = "async def" if inspect.iscoroutinefunction(function) else "def"
    text = (
        f"{keyword}"
        f" {name}{signature.replace(parameters=shown, return_annotation=_Bare(signature.return_annotation))}"
    )
    if len(text) <= 120:
        return text
    head, _, rest = text.partition("(")
    inside, _, tail = rest.rpartition(") -> ")
    parts = re.split(r", (?=\w+: |\*, |\*$)", inside)
    return f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f") -> {tail}"


class _Bare(str):
    """Text that shows itself without quotes, as an annotation does in source."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _bare(default: Any) -> Any:
    return (
        _Bare(f"{type(default).__name__}.{default.name}") if isinstance(default, Enum) else default
    )


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "`{}`" if field.default_factory is not MISSING else "required"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _text(documented: Any) -> str:
    """The docstring as Markdown: indented code behind ``::`` becomes a fenced block."""
    out: list[str] = []
    code = False
    for line in inspect.cleandoc(documented.__doc__ or "").split("\n"):
        if code and line and not line.startswith("    "):
            while out[-1] == "":
                out.pop()
            out += ["```", ""]
            code = False
        if line.endswith("::"):
            out += [line.removesuffix(":"), "", "```python"]
            code = True
        elif not (code and line == "" and out[-1] == "```python"):
            out.append(line.removeprefix("    ") if code else line)
    return "\n".join([*out, "```"] if code else out)
