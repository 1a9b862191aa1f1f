"""Fault plan: what goes wrong on the wire, and with which requests. It is read from TOML or JSON.

For instance::

    seed = 3

    [[faults]]
    do = "reset"            # or slow, status, truncate, wrong-length
    path = "/generate"      # "/v1/*" is all below; default: everything
    request_id = "r1"       # calls of this rid, request_id or x-rollproof-request; default: all
    nth = [2, 5]            # the second and the fifth of those that fit; or
    probability = 0.1       # one in ten of them, drawn from the seed

The engine's own schedule (aborts, evictions, lost replies at a token count) stands under
``[[actions]]``, in the form of a case.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from rollproof.core.case import Action, ActionKind, Trigger
from rollproof.errors import UsageError

__all__ = ["ENGINE_ACTIONS", "FaultPlan", "Faults", "WireFault", "WireFaultKind", "happened"]


class WireFaultKind(StrEnum):
    """What happens to an answer."""

    RESET = "reset"
    """The connection is reset after a part of the answer."""
    SLOW = "slow"
    """The answer comes ``seconds`` late."""
    STATUS = "status"
    """A ``status`` in place of the answer: before the engine saw the request, or (``after_engine``)
    after it had sampled.
    """
    TRUNCATE = "truncate"
    """The connection is closed after a part of the answer, whose length was declared right."""
    WRONG_LENGTH = "wrong-length"
    """The answer stops early, and its declared length (of a stream: its last chunk) says that this
    is all.
    """


ENGINE_ACTIONS = (
    ActionKind.ABORT,
    ActionKind.EVICT,
    ActionKind.LOSE_REPLY,
    ActionKind.LATE_REPLY,
    ActionKind.REJECT,
    ActionKind.KILL,
)
"""What a plan may have the engine itself do; the others concern a trainer's weight updates, which
its clients ask for.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFault:
    """One fault, and the requests that it befalls: of those of ``path`` and of ``request_id`` the
    ``nth``, or drawn ones, or all.

    ``times`` bounds how often it happens. ``keep`` is the share of the answer's bytes (of a stream:
    its events) that still goes out. Raises ``UsageError`` where the fields do not make sense.
    """

    do: WireFaultKind
    path: str = "*"
    nth: tuple[int, ...] = ()
    request_id: str | None = None
    probability: float | None = None
    times: int | None = None
    seconds: float = 1.0
    status: int = 503
    after_engine: bool = False
    keep: float = 0.5

    def __post_init__(self) -> None:
        problems = []
        if self.do not in list(WireFaultKind):
            problems.append(_no_kind(self.do, WireFaultKind))
        if not (self.path == "*" or str(self.path).startswith("/")):
            problems.append(
                f"path={self.path!r} must be a path such as '/generate', '/v1/*', or '*'."
            )
        if any(not _whole(number, 1) for number in self.nth):
            problems.append(f"nth={list(self.nth)!r} must be whole numbers from 1.")
        if self.times is not None and not _whole(self.times, 1):
            problems.append(f"times={self.times!r} must be a whole number from 1.")
        if self.probability is not None and not _number(self.probability, 0.0, 1.0):
            problems.append(f"probability={self.probability!r} must be a number from 0 to 1.")
        if self.nth and self.probability is not None:
            problems.append("nth and probability exclude each other: write a fault for each.")
        if self.request_id is not None and not (
            self.request_id and str(self.request_id) == self.request_id
        ):
            problems.append(f"request_id={self.request_id!r} must be a text.")
        if not _number(self.seconds, 0.0, 3600.0):
            problems.append(f"seconds={self.seconds!r} must be a number from 0 to 3600.")
        if not _whole(self.status, 400) or self.status > 599:
            problems.append(f"status={self.status!r} must be a status from 400 to 599.")
        if not _number(self.keep, 0.0, 1.0) or self.keep == 1.0:
            problems.append(f"keep={self.keep!r} must be a share from 0 to below 1.")
        if self.after_engine not in (True, False):
            problems.append(f"after_engine={self.after_engine!r} must be true or false.")
        if problems:
            raise UsageError("This fault cannot be planned:\n  - " + "\n  - ".join(problems))

    def concerns(self, path: str) -> bool:
        """Whether requests of this path can be befallen; by what rollproof's own client tells, none
        can.
        """
        if path.startswith("/rollproof/"):
            return False
        return self.path in ("*", path) or (
            self.path.endswith("/*") and path.startswith(self.path[:-1])
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """Faults of the wire, and actions of the engine. Of several faults that are due at once, the
    first happens.
    """

    faults: tuple[WireFault, ...] = ()
    actions: tuple[Action, ...] = ()
    seed: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the form of the file. Raises ``UsageError`` that names what is wrong."""
        stray = sorted(set(data) - {"faults", "actions", "seed"})
        if stray:
            raise UsageError(f"A fault plan has no {stray}; it has 'faults', 'actions' and 'seed'.")
        if not _whole(data.get("seed", 0), 0):
            raise UsageError(f"seed={data['seed']!r} must be a whole number from 0.")
        faults = tuple(
            _wire_fault(number, item) for number, item in enumerate(_listed(data, "faults"))
        )
        actions = tuple(
            _action(number, item) for number, item in enumerate(_listed(data, "actions"))
        )
        return cls(faults=faults, actions=actions, seed=data.get("seed", 0))

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a file in TOML, or in JSON where its name ends so. Raises ``UsageError``."""
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"The fault plan {path} cannot be read: {error}.") from error
        if not isinstance(data, dict):
            raise UsageError(f"The fault plan {path} must be an object with 'faults'.")
        try:
            return cls.from_dict(data)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


@dataclass(slots=True)
class Faults:
    """A plan being carried out by one server: it counts requests and draws, and tells what happens
    to whom it may concern.
    """

    plan: FaultPlan
    told: Callable[[WireFault, str], None]
    _seen: dict[int, int] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)
    _draws: dict[int, random.Random] = field(default_factory=dict)

    def due(self, path: str, body: bytes, owner: str | None = None) -> WireFault | None:
        """The fault that befalls this request; every request must be told, once. ``owner`` is whose
        it says to be, beside its body.
        """
        found = None
        for number, fault in enumerate(self.plan.faults):
            if not fault.concerns(path) or not (
                fault.request_id is None
                or fault.request_id == owner
                or fault.request_id in _ids(body)
            ):
                continue
            self._seen[number] = self._seen.get(number, 0) + 1
            spent = fault.times is not None and self._done.get(number, 0) >= fault.times
            if self._befalls(number, fault) and not spent and found is None:
                self._done[number] = self._done.get(number, 0) + 1
                found = fault
                self.told(fault, path)
        return found

    def count(self, number: int) -> tuple[int, int]:
        """How many requests the fault befell so far, and how many there were that it could have."""
        return self._done.get(number, 0), self._seen.get(number, 0)

    def _befalls(self, number: int, fault: WireFault) -> bool:
        if fault.nth:
            return self._seen[number] in fault.nth
        if fault.probability is not None:
            draw = self._draws.setdefault(number, random.Random(f"{self.plan.seed}/{number}"))
            return draw.random() < fault.probability
        return True


def happened(
    plan: FaultPlan, carried: Iterable[Faults | None], waiting: Iterable[Action]
) -> Iterator[str]:
    """A line for each fault and action: how often it happened on all servers. ``waiting`` are the
    actions that did not.
    """
    servers = [faults for faults in carried if faults is not None]
    for number, fault in enumerate(plan.faults):
        counts = [faults.count(number) for faults in servers]
        befell, fitted = sum(one for one, _ in counts), sum(one for _, one in counts)
        place = "" if fault.path == "*" else f" to {fault.path}"
        whose = "" if fault.request_id is None else f" with the id {fault.request_id!r}"
        yield f"fault {number + 1} ({fault.do}): befell {befell} of {fitted} requests{place}{whose}"
    happened_of = Counter(plan.actions) - Counter(waiting)
    for number, action in enumerate(plan.actions):
        when = action.when
        word = (
            "happened"
            if happened_of[action] > 0
            else f"did not happen: {when.request!r} did not come so far"
        )
        happened_of[action] -= 1  # of two alike the first
        yield (
            f"action {number + 1} ({action.do} of {when.request!r} at {when.tokens} tokens): {word}"
        )


def _ids(body: bytes) -> tuple[str, ...]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(data, dict):
        return ()
    return tuple(
        str(data[name]) for name in ("rid", "request_id") if isinstance(data.get(name), str)
    )


_KEEPING = (WireFaultKind.RESET, WireFaultKind.TRUNCATE, WireFaultKind.WRONG_LENGTH)
_ONLY_OF: Mapping[str, tuple[WireFaultKind, ...]] = {
    "seconds": (WireFaultKind.SLOW,),
    "status": (WireFaultKind.STATUS,),
    "after_engine": (WireFaultKind.STATUS,),
    "keep": _KEEPING,
}
"""Fields that say something of these faults alone: with another, they would be passed over in
silence.
"""


def _listed(data: Mapping[str, Any], name: str) -> Iterable[Any]:
    found = data.get(name, [])
    if not isinstance(found, list) or any(not isinstance(item, dict) for item in found):
        raise UsageError(
            f"{name} must be a list of tables: in TOML one [[{name}]] for each, in JSON a list of"
            " objects."
        )
    return found


def _no_kind(given: object, kinds: Iterable[StrEnum]) -> str:
    """The words for a ``do`` that names nothing, with the one that may be meant."""
    known = [str(kind) for kind in kinds]
    close = get_close_matches(str(given), known, 1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"do={given!r} must be one of {known}.{meant}"


def _fields_of(
    what: str, item: Mapping[str, Any], known: Iterable[str], needed: Iterable[str]
) -> None:
    """Refuse a table that lacks a field, or has one that there is not."""
    stray = sorted(set(item) - set(known))
    if stray:
        raise UsageError(
            f"{what} has no field {', '.join(map(repr, stray))}; its fields are {sorted(known)}."
        )
    missing = [name for name in needed if name not in item]
    if missing:
        raise UsageError(
            f"{what} needs {' and '.join(map(repr, missing))}; its fields are {sorted(known)}."
        )


def _wire_fault(number: int, item: Mapping[str, Any]) -> WireFault:
    what = f"Fault {number + 1}"
    _fields_of(what, item, [one.name for one in fields(WireFault)], ["do"])
    if item["do"] not in list(WireFaultKind):
        raise UsageError(f"{what}: {_no_kind(item['do'], WireFaultKind)}")
    values = dict(item)
    idle = sorted(
        name for name, kinds in _ONLY_OF.items() if name in values and values["do"] not in kinds
    )
    if idle:
        raise UsageError(
            f"{what} ({values['do']}): "
            + "; ".join(
                f"{name} says something of {' and '.join(_ONLY_OF[name])} alone" for name in idle
            )
            + "."
        )
    if item.get("nth") == []:
        raise UsageError(
            f"{what}: nth=[] names no call. Leave it out where each that fits is to be befallen."
        )
    values["do"] = WireFaultKind(values["do"])
    values["nth"] = (
        tuple(item["nth"])
        if isinstance(item.get("nth"), list)
        else (item["nth"],)
        if "nth" in item
        else ()
    )
    try:
        return WireFault(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace("This fault", what, 1)) from error


def _action(number: int, item: Mapping[str, Any]) -> Action:
    what = f"Action {number + 1}"
    _fields_of(what, item, [one.name for one in fields(Action)], ["do", "when"])
    if item["do"] not in ENGINE_ACTIONS:
        other = (
            ""
            if item["do"] not in list(ActionKind)
            else " A served engine does no other by itself: the rest is up to its clients."
        )
        raise UsageError(f"{what}: {_no_kind(item['do'], ENGINE_ACTIONS)}{other}")
    if not isinstance(item["when"], dict):
        raise UsageError(
            f"{what}: when={item['when']!r} must be a table, such as {{ request = 'r1', tokens ="
            " 2 }."
        )
    _fields_of(
        f"'when' of {what.lower()}",
        item["when"],
        [one.name for one in fields(Trigger)],
        ["request", "tokens"],
    )
    given = {**{f"when.{name}": value for name, value in item["when"].items()}, **item}
    wanted: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("when.request", lambda value: isinstance(value, str), "a text"),
        ("when.tokens", lambda value: _whole(value, 0), "a whole number from 0"),
        ("when.queued", lambda value: isinstance(value, bool), "true or false"),
        ("when.race", lambda value: isinstance(value, bool), "true or false"),
        ("steps", lambda value: _whole(value, 0), "a whole number from 0"),
        ("server", lambda value: isinstance(value, str), "a text"),
    )
    problems = [
        f"{name}={given[name]!r} must be {words}."
        for name, fits, words in wanted
        if name in given and not fits(given[name])
    ]
    if problems:
        raise UsageError(f"{what} cannot be planned:\n  - " + "\n  - ".join(problems))
    return Action(**{**item, "when": Trigger(**item["when"]), "do": ActionKind(item["do"])})


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
