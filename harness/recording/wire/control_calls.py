"""What the endpoints do by which a trainer stops, updates and flushes an engine.

Only what a request says and a reply confirms: whether weights that are loaded differ from those
before, for instance, no endpoint says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Version
from rollproof.recording.wire.exchange import Exchange

__all__ = ["CONTROL_PATHS", "Control", "ControlKind", "control_of", "succeeded"]


class ControlKind(StrEnum):
    """What a control request does."""

    ABORT = "abort"
    PAUSE = "pause"
    RESUME = "resume"
    LOAD = "load"
    LABEL = "label"
    CACHE = "cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A control request.

    Attributes:
        kind: what it does.
        wanted: the handles that it aborts; ``("*",)``: all.
        mode: of a pause.
        clear_cache: whether it drops the prefix cache.
        label: the label that it publishes; ``None``: none.
        aborts_all: whether it ends every call that runs.
        stops: whether it also pauses the engine and resumes it (AReaL's updates).
    """

    kind: ControlKind
    wanted: tuple[str, ...] = ()
    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = False
    label: Version = None
    aborts_all: bool = False
    stops: bool = False


_SGLANG_MODES = {
    "abort": PauseMode.ABORT,
    "retract": PauseMode.RETRACT,
    "in_place": PauseMode.IN_PLACE,
}
_VLLM_MODES = {"abort": PauseMode.ABORT, "wait": PauseMode.WAIT, "keep": PauseMode.KEEP}
_SGLANG_LOADS = frozenset(
    f"/update_weights_from_{source}" for source in ("disk", "tensor", "distributed", "ipc")
)
_AREAL_LOADS = frozenset(
    f"/areal_update_weights{kind}" for kind in ("", "_lora", "_xccl", "_lora_xccl")
)
_CACHES = frozenset(("/flush_cache", "/reset_prefix_cache", "/release_memory_occupation"))


def control_of(exchange: Exchange, engine: str) -> Control | None:
    """Return what a request does to the engine; ``None`` if it is no control request, or one that
    cannot be read. ``engine`` is ``sglang`` or ``vllm``, or empty if it is not known.
    """
    try:
        body = exchange.request_json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        # weights themselves may be in the body, and make it longer than a recorder keeps
        is_load = exchange.path in (*_SGLANG_LOADS, *_AREAL_LOADS, "/update_weights")
        return Control(kind=ControlKind.LOAD) if is_load else None
    if exchange.path == "/update_weight_version":
        return _label(engine, body)
    read = _READERS.get(exchange.path)
    if read is not None:
        return read(exchange, body)
    if exchange.path in _SGLANG_LOADS:
        return Control(
            kind=ControlKind.LOAD,
            label=_text(body.get("weight_version")),
            # SGLang's default drops it: the old weights computed it
            clear_cache=body.get("flush_cache") is not False,
            aborts_all=body.get("abort_all_requests") is True,
        )
    if exchange.path in _AREAL_LOADS:
        return Control(kind=ControlKind.LOAD, clear_cache=True, stops=True)
    if exchange.path in _CACHES:
        return Control(kind=ControlKind.CACHE, clear_cache=True)
    return None


def succeeded(exchange: Exchange) -> bool:
    """Return whether the reply says that it was done."""
    if not 200 <= exchange.status < 300:
        return False
    reply = exchange.reply_json()
    return not (isinstance(reply, dict) and reply.get("success") is False)


def _abort_sglang(_exchange: Exchange, body: Mapping[str, Any]) -> Control | None:
    if body.get("abort_all") is True:
        return Control(kind=ControlKind.ABORT, wanted=("*",))
    rid = body.get("rid")
    return Control(kind=ControlKind.ABORT, wanted=(rid,)) if isinstance(rid, str) and rid else None


def _abort_vllm(_exchange: Exchange, body: Mapping[str, Any]) -> Control:
    rids = body.get("request_ids")
    rids = [rids] if isinstance(rids, str) else rids
    named = tuple(map(str, rids)) if isinstance(rids, list) else ()
    return Control(kind=ControlKind.ABORT, wanted=named or ("*",))


def _pause_sglang(_exchange: Exchange, body: Mapping[str, Any]) -> Control | None:
    mode = _SGLANG_MODES.get(str(body.get("mode", "abort")))
    return None if mode is None else Control(kind=ControlKind.PAUSE, mode=mode)


def _pause_vllm(exchange: Exchange, _body: Mapping[str, Any]) -> Control | None:
    mode = _VLLM_MODES.get(exchange.query.get("mode", "abort"))
    if mode is None:
        return None
    clear = exchange.query.get("clear_cache", "true").lower() in ("true", "1", "yes", "on", "")
    # level 0 only stops the scheduler, and leaves the memory alone
    if exchange.path == "/sleep":
        clear = exchange.query.get("level", "1") != "0"
    return Control(kind=ControlKind.PAUSE, mode=mode, clear_cache=clear)


def _pause_areal(_exchange: Exchange, _body: Mapping[str, Any]) -> Control:
    return Control(kind=ControlKind.PAUSE, mode=PauseMode.ABORT, clear_cache=True)


def _resume(_exchange: Exchange, _body: Mapping[str, Any]) -> Control:
    return Control(kind=ControlKind.RESUME)


def _wake(exchange: Exchange, _body: Mapping[str, Any]) -> Control | None:
    # without the KV cache nothing runs yet
    tags = exchange.query.get("tags")
    return Control(kind=ControlKind.RESUME) if tags in (None, "", "kv_cache") else None


def _load_vllm(_exchange: Exchange, body: Mapping[str, Any]) -> Control:
    return Control(kind=ControlKind.LOAD, label=_text(body.get("weight_version")))


def _finish_vllm(_exchange: Exchange, body: Mapping[str, Any]) -> Control | None:
    label = _text(body.get("weight_version"))
    return None if label is None else Control(kind=ControlKind.LABEL, label=label)


def _rpc(_exchange: Exchange, body: Mapping[str, Any]) -> Control | None:
    # a method of the stack's own: only its name says what it does
    method = str(body.get("method", ""))
    loads = "weight" in method and method.startswith(("reload", "load", "update", "receive"))
    return Control(kind=ControlKind.LOAD) if loads else None


def _lora(_exchange: Exchange, _body: Mapping[str, Any]) -> Control:
    # the name of an adapter is no label of weights: replies do not show it
    return Control(kind=ControlKind.LOAD)


def _label(engine: str, body: Mapping[str, Any]) -> Control | None:
    label = _text(body.get("new_version"))
    if label is None:
        return None
    # SGLang aborts what runs unless it is told not to, and vLLM has no such field
    aborts = body.get("abort_all_requests", engine == "sglang")
    return Control(kind=ControlKind.LABEL, label=label, aborts_all=aborts is True)


_READERS = {
    "/abort_request": _abort_sglang,
    "/abort_requests": _abort_vllm,
    "/inference/v1/abort_requests": _abort_vllm,
    "/pause_generation": _pause_sglang,
    "/continue_generation": _resume,
    "/pause": _pause_vllm,
    "/resume": _resume,
    "/sleep": _pause_vllm,
    "/wake_up": _wake,
    "/areal_pause_generation": _pause_areal,
    "/areal_continue_generation": _resume,
    "/collective_rpc": _rpc,
    "/update_weights": _load_vllm,
    "/finish_weight_update": _finish_vllm,
    "/load_lora_adapter": _lora,
    "/v1/load_lora_adapter": _lora,
    "/skyrl/v1/load_lora_adapter": _lora,
}


CONTROL_PATHS: frozenset[str] = frozenset(
    (*_READERS, *_SGLANG_LOADS, *_AREAL_LOADS, *_CACHES, "/update_weight_version")
)
"""Every path that ``control_of`` knows."""


def _text(value: Any) -> Version:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None
