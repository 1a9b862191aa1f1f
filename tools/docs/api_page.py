"""Writes docs/api.md from docstrings and signatures: what an adapter is written against, how the
engine flavours answer, and which modules are public.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

import rollproof
from rollproof.fakes.engine import exceptions
from rollproof.fakes.engine.flavours import FLAVOURS, Flavour, PausedCalls, VersionTag
from rollproof.layouts.functions import FUNCTIONS
from tools.docs.docstrings import described_fields, markdown, one_line

__all__ = ["PUBLIC_MODULES", "api_page"]

PUBLIC_MODULES: Mapping[str, str] = {
    "rollproof": "everything above, and the records, subjects, checks and errors",
    "rollproof.errors": "all errors, also those of engines and of routing replay",
    "rollproof.records": "records, and the array types of their fields",
    "rollproof.trace": "the events of a trace",
    "rollproof.store": "reading and writing trace files",
    "rollproof.contracts": "contracts of public stacks, to start from",
    "rollproof.contracts.stand_in": "a client that keeps any contract",
    "rollproof.layouts": "layouts of routing replay over ranks",
    "rollproof.corrections": "corrections for off-policy rollouts: terms, records, subjects",
    "rollproof.replay.contract": "the contract of a trainer with routing replay",
    "rollproof.replay.terms": "the enums of that contract",
    "rollproof.replay.events": "what such a trainer gets and returns",
    "rollproof.replay.spy": "the observer of its routers",
    "rollproof.replay.layouts": "the same as `rollproof.layouts`",
    "rollproof.replay.hf": "routing replay for models of Hugging Face transformers",
    "rollproof.replay.hf.model_families": "tiny models of those families",
    "rollproof.replay.hf.hf_setups": "the ways to lay samples out for such a model",
    "rollproof.replay.hf.hf_replay_trainer": "a trainer around a model, to have it judged",
    "rollproof.replay.megatron.cuda_stand_in": "megatron-core without CUDA",
    "rollproof.gap": "the gap between the logprobs of a rollout and of its trainer",
    "rollproof.gap.hf_trainer": "a scorer for checkpoints of Hugging Face models",
    "rollproof.gap.localise.forwards": "forwards that `localise` compares",
    "rollproof.engines": "rollout engines as subjects",
    "rollproof.core.engine_protocol": "the records of the `EngineSubject` protocol",
    "rollproof.stacks": "adapters of released frameworks",
    "rollproof.fakes.engine.exceptions": "what fake servers raise",
    "rollproof.fakes.engine.engine_subject": "the fake engine as an `EngineSubject`",
    "rollproof.fakes.http.serving": "fake HTTP servers within a program",
    "rollproof.fakes.http.trace_client": "reports requests and samples to a fake HTTP server",
    "rollproof.http_clients": "hooks of HTTP clients whose samples are judged",
    "rollproof.recording.served_fleet": "fake HTTP servers for a test, as the fixtures start them",
    "rollproof.fakes.coded.policy": "the fake policy: every token, logprob and expert",
    "rollproof.fakes.tiny_models": "tiny random checkpoints",
    "rollproof.fakes.trainers.replay_trainer": "the reference trainer, to derive from",
}
"""The modules that users may import from, and what for; all others may change in any release."""

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
    "internal",
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
        "# API\n\nWhat an adapter is written against; `help(rollproof.Rollout)` says the same in a"
        " Python prompt. Names without a module are those of `rollproof`; records are made with keyword"
        " arguments. [contract.md](contract.md)"
        " has the fields of the `Contract`, [replay.md](replay.md) those of trainers,"
        " [corrections.md](corrections.md) those of corrections.\n"
    )
    yield "## What you write"
    yield from _class(
        rollproof.RolloutSubject, ("start", "rollout", "update_weights", "to_record", "stop")
    )
    yield from _class(rollproof.BatchSubject, ("collate", "rows"))
    yield from _layout_functions()
    yield "\n## What it gets and returns"
    for record in _RECORDS:
        yield from _class(record, ("budget",) if record is rollproof.Request else ())
    yield "\n## The fake servers"
    yield from _class(
        rollproof.Fleet,
        _FLEET,
        "`fleet.servers` maps ids to `FakeEngine`; `fleet.case` is the `Case` that runs;"
        " `fleet.recorder.record(event)` adds an event to the trace, such as the `Observation` of a"
        " tool's answer; `fleet.policy` is the coded policy, with its `eos_id`.",
    )
    yield from _class(
        rollproof.FakeEngine,
        _ENGINE,
        "`server.alive` says whether it runs, `server.in_flight` lists its calls. A handle of"
        " `fleet.ray_handles()` has the same methods: `handle.generate.remote(...)` returns a"
        " future.",
    )
    yield (
        "\n### What they raise\n\nOf `rollproof.fakes.engine.exceptions`; each is below the builtin"
        " that a real client raises.\n"
    )
    for name in exceptions.__all__:
        error = getattr(exceptions, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        yield f"- `{name}` ({bases}): {one_line(error.__doc__ or '')}"
    yield from _flavours()
    yield "\n## Running it"
    for function in (
        rollproof.run_conformance,
        rollproof.conformance,
        rollproof.record,
        rollproof.record_live,
    ):
        yield from _function(
            function, function.__name__, level=3, title=f"rollproof.{function.__name__}"
        )
    yield (
        "\n### Other kinds of subjects\n\n`help()` lists the arguments, which are those of"
        " `run_conformance` as far as they apply.\n"
    )
    for function in (
        rollproof.judge_batches,
        rollproof.judge_replay,
        rollproof.judge_layouts,
        rollproof.judge_corrections,
    ):
        summary = one_line((function.__doc__ or "").partition("\n\n")[0])
        yield f"- `rollproof.{function.__name__}(factory, ...)`: {summary}"
    yield (
        "\n### Report\n\nIts attributes are the keys of the [JSON"
        " report](entry-points.md#json-report-schema-1), with `results` for `checks`; and:\n"
    )
    for name in ("failed", "summary", "exit_code", "to_dict"):
        yield _bullet(_member(rollproof.Report, name), name)
    yield from _class(rollproof.EngineCall)
    yield from _class(rollproof.Recording, _RECORDING)
    yield from _function(rollproof.lend, "lend", level=3, title="rollproof.lend")
    yield from _modules()


def _layout_functions() -> Iterator[str]:
    yield from _class(rollproof.LayoutSubject)
    yield (
        "\n`rollproof init layouts` writes a test that lists the functions, with what each gets and"
        f" returns: {', '.join(f'`{name}`' for name in FUNCTIONS)}."
    )


def _modules() -> Iterator[str]:
    yield (
        "\n## Public modules\n\nImport from these (their `__all__`); every other module is private,"
        " and may change in any release.\n\n| module | for |\n|---|---|"
    )
    for module, purpose in PUBLIC_MODULES.items():
        yield f"| `{module}` | {purpose} |"


def _flavours() -> Iterator[str]:
    yield (
        "\n## Engine flavours\n\nThe `flavours` of an adapter name those that it supports; `out` is"
        " the `EngineOutput` of a call. An abort without tokens has no rows.\n"
    )
    yield (
        "| flavour | rows | layer axis | dtype | version of the weights | logprobs | those of an"
        " empty abort | a call while paused |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for flavour in FLAVOURS.values():
        cells = (
            f"`{flavour.name}`",
            f"`{flavour.rows}`",
            f"`{flavour.layer_axis}`",
            _dtypes(flavour),
            _SHOWN[flavour.version_tag],
            f"`{flavour.logprobs}`",
            _empty_abort(flavour),
            _PAUSED[flavour.paused_calls],
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    for flavour in FLAVOURS.values():
        yield f"- `{flavour.name}`: {flavour.source}"


def _dtypes(flavour: Flavour) -> str:
    if len(flavour.dtypes) == 1:
        return f"`{flavour.dtypes[0][1]}`"
    return ", ".join(f"`{name}` (to {largest} experts)" for largest, name in flavour.dtypes)


def _empty_abort(flavour: Flavour) -> str:
    logprobs = "of length 0" if flavour.empty_logprobs else "`None`"
    return f"{logprobs}{', one empty span' if flavour.version_tag is VersionTag.SPANS_AND_LAST else ''}"


def _class(cls: type, members: tuple[str, ...] = (), more: str = "") -> Iterator[str]:
    text, meanings = described_fields(cls.__doc__)
    yield f"\n### {cls.__name__}\n\n{markdown(text if is_dataclass(cls) else cls.__doc__)}"
    if more:
        yield f"\n{more}"
    if issubclass(cls, Enum):
        yield f"\nValues: {', '.join(f'`{member.value}`' for member in cls)}."
    if is_dataclass(cls):
        yield ""
        for field in fields(cls):
            meaning = meanings.get(field.name, "").replace("\\|", "|")
            kind = one_line(str(field.type)).replace("\\|", "|")
            yield f"- `{field.name}: {kind}{_default(field)}`{f': {meaning}' if meaning else ''}"
    long = [name for name in members if _is_long(_member(cls, name))]
    if len(long) < len(members):
        yield ""
    for name in members:
        if name not in long:
            yield _bullet(_member(cls, name), name)
    for name in long:
        yield from _function(_member(cls, name), name, level=4, title=f"{cls.__name__}.{name}")


def _is_long(member: Any) -> bool:
    """Whether a method needs more than a line of text."""
    return not isinstance(member, property) and bool(
        re.search(r"::$|^ *Args:$", member.__doc__ or "", re.MULTILINE)
    )


def _bullet(member: Any, name: str) -> str:
    if isinstance(member, property):
        assert member.fget is not None
        signature = f"{name}: {member.fget.__annotations__['return']}"
        return f"- `{signature}`: {one_line(member.fget.__doc__ or '').removeprefix('Return ')}"
    signature = " ".join(_signature(member, name).split()).replace("( ", "(").replace(", )", ")")
    return f"- `{signature.replace('def ', '')}`: {one_line(member.__doc__ or '')}"


def _member(cls: type, name: str) -> Any:
    return inspect.getattr_static(cls, name)


def _function(function: Callable[..., Any], name: str, *, level: int, title: str) -> Iterator[str]:
    text = markdown(function.__doc__)
    signature = inspect.signature(function)
    described = {
        name: f"- `{_parameter(parameter)}`:"
        for name, parameter in signature.parameters.items()
        if f"\n- `{name}`:" in text
    }
    if len(described) < _SEVERAL:
        yield f"\n{'#' * level} {title}\n\n```python\n{_signature(function, name)}\n```\n\n{text}"
        return
    # the list of arguments has their types and defaults: a signature would say them a second time
    assert set(described) == set(signature.parameters) - {"self"}, title
    for parameter in _NOT_FOR_ADAPTERS:
        text = re.sub(rf"^- `{parameter}`:.*\n(?:  .*\n)*", "", text, flags=re.MULTILINE)
    first = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self"
    ]
    begin = "await " if inspect.iscoroutinefunction(function) else ""
    call = f"{begin}{name}({', '.join([*first, '*', '...'])}) -> {signature.return_annotation}"
    yield f"\n{'#' * level} {title}\n\n`{call}`\n"
    yield re.sub(r"^- `(\w+)`:", lambda m: described.get(m[1], m[0]), text, flags=re.MULTILINE)


_NOT_FOR_ADAPTERS = ("draw", "siblings", "wire")
"""Arguments that only the fake HTTP servers pass."""
_SEVERAL = 4
"""From so many described arguments on, a list of them takes the place of a signature."""


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter with its type and its default."""
    return str(
        parameter.replace(
            kind=parameter.KEYWORD_ONLY,
            annotation=_Bare(parameter.annotation),
            default=_bare(parameter.default),
        )
    )


def _signature(function: Callable[..., Any], name: str) -> str:
    """Return the signature without ``self``, with one parameter per line if it is long."""
    signature = inspect.signature(function)
    shown = [
        (
            parameter.replace(
                annotation=_Bare(parameter.annotation), default=_bare(parameter.default)
            )
            if parameter.annotation is not parameter.empty
            else parameter
        )
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    keyword = "async def" if inspect.iscoroutinefunction(function) else "def"
    plain = signature.replace(
        parameters=shown, return_annotation=_Bare(signature.return_annotation)
    )
    text = f"{keyword} {name}{plain}"
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
    """Return the default as a signature has it; "" if there is none."""
    if field.default is not MISSING:
        return f" = {field.default!r}"
    return " = {}" if field.default_factory is not MISSING else ""
