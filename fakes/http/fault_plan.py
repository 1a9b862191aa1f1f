"""Plans of faults: what goes wrong on the wire, and with which requests. TOML or JSON.

For instance::

    seed = 3

    [[faults]]
    do = "reset"            # or slow, status, truncate, wrong-length
    path = "/generate"      # "/v1/*" is all paths below; default: every path
    request_id = "r1"       # calls of this rid, request_id or x-rollproof-request; default: all
    nth = [2, 5]            # the second and the fifth matching request; or
    probability = 0.1       # one in ten of them, drawn from the seed

Actions of the engine (aborts, evictions, lost replies at a token count) are under ``[[actions]]``,
in the form of a case.
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

__all__ = [
    "ENGINE_ACTIONS",
    "FaultPlan",
    "PlanProgress",
    "WireFault",
    "WireFaultKind",
    "plan_summary",
]


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
    """The connection is closed after a part of the answer; the declared length is that of all."""
    WRONG_LENGTH = "wrong-length"
    """The answer stops early, and its declared length (or the last chunk of a stream) says that
    this is all.
    """


ENGINE_ACTIONS = (
    ActionKind.ABORT,
    ActionKind.EVICT,
    ActionKind.LOSE_REPLY,
    ActionKind.LATE_REPLY,
    ActionKind.REJECT,
    ActionKind.KILL,
    ActionKind.SYNC,
)
"""Actions that a plan may contain. Of weight updates it has the usual one, to every server; others
are requested by the clients of the servers.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFault:
    """One fault, and the requests that it is applied to.

    Attributes:
        do: what happens.
        path: requests to this path match; ``/v1/*`` is all paths below.
        nth: of the matching requests, only these; counted from 1.
        request_id: only requests with this id match.
        probability: of the matching requests, this share, drawn from the plan's seed.
        times: the most requests that it is applied to.
        seconds: how late a slow answer is; ``slow`` needs it, and nothing else takes it.
        status: the status that replaces the answer.
        after_engine: the status comes after the engine has sampled.
        keep: the share of the answer's bytes, or of a stream's events, that is still sent.

    Raises:
        UsageError: a value is wrong, or two exclude each other.
    """

    do: WireFaultKind
    path: str = "*"
    nth: tuple[int, ...] = ()
    request_id: str | None = None
    probability: float | None = None
    times: int | None = None
    seconds: float | None = None
    status: int = 503
    after_engine: bool = False
    keep: float = 0.5

    def __post_init__(self) -> None:
        problems = []
        if self.do not in list(WireFaultKind):
            problems.append(_unknown_kind(self.do, WireFaultKind))
        if not (self.path == "*" or str(self.path).startswith("/")):
            problems.append(
                f"path={self.path!r} must be a path such as '/generate', '/v1/*', or '*'."
            )
        if any(not _is_integer(number, 1) for number in self.nth):
            problems.append(f"nth={list(self.nth)!r} must be whole numbers from 1.")
        if self.times is not None and not _is_integer(self.times, 1):
            problems.append(f"times={self.times!r} must be a whole number from 1.")
        if self.probability is not None and not _is_number(self.probability, 0.0, 1.0):
            problems.append(f"probability={self.probability!r} must be a number from 0 to 1.")
        if self.nth and self.probability is not None:
            problems.append("nth and probability exclude each other: write a fault for each.")
        if self.request_id is not None and not (
            self.request_id and str(self.request_id) == self.request_id
        ):
            problems.append(f"request_id={self.request_id!r} must be a text.")
        if self.seconds is not None and not _is_number(self.seconds, 0.0, 3600.0):
            problems.append(f"seconds={self.seconds!r} must be a number from 0 to 3600.")
        if self.seconds is None and self.do == WireFaultKind.SLOW:
            problems.append("do = 'slow' needs seconds, such as 2.5: how late the answer is.")
        if not _is_integer(self.status, 400) or self.status > 599:
            problems.append(f"status={self.status!r} must be a status from 400 to 599.")
        if not _is_number(self.keep, 0.0, 1.0) or self.keep == 1.0:
            problems.append(f"keep={self.keep!r} must be a share from 0 to below 1.")
        after: object = self.after_engine  # a file may hold anything
        if not isinstance(after, bool):
            problems.append(f"after_engine={self.after_engine!r} must be true or false.")
        if problems:
            raise UsageError("This fault cannot be planned:\n  - " + "\n  - ".join(problems))

    def concerns(self, path: str) -> bool:
        """Return whether a request to ``path`` matches; those of ``Teller`` never do."""
        # what a stack reports is not part of the wire that is tested
        if path.startswith("/rollproof/"):
            return False
        return self.path in ("*", path) or (
            self.path.endswith("/*") and path.startswith(self.path[:-1])
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """Faults of the wire, and actions of the engine. Of several faults that are due at the same
    request, the first is applied.
    """

    faults: tuple[WireFault, ...] = ()
    actions: tuple[Action, ...] = ()
    seed: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the content of a plan's file. Raise ``UsageError`` that names what is wrong."""
        unknown = sorted(set(data) - {"faults", "actions", "seed"})
        if unknown:
            raise UsageError(
                f"A fault plan has no {unknown}; it has 'faults', 'actions' and 'seed'."
            )
        if not _is_integer(data.get("seed", 0), 0):
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
        """Read a file in TOML, or in JSON if its name ends in ``.json``. Raise ``UsageError``."""
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
class PlanProgress:
    """How far one server has carried out a plan: it counts requests, and draws.

    Attributes:
        plan: the plan.
        on_fault: called with each fault that is applied, and the path of its request.
    """

    plan: FaultPlan
    on_fault: Callable[[WireFault, str], None]
    _seen: dict[int, int] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)
    _draws: dict[int, random.Random] = field(default_factory=dict)

    def due(self, path: str, body: bytes, owner: str | None = None) -> WireFault | None:
        """Count one request, and return the fault to apply to it.

        Args:
            path: its path.
            body: its body, which may name its id.
            owner: the id in its headers.
        """
        due = None
        for number, fault in enumerate(self.plan.faults):
            if not fault.concerns(path) or not (
                fault.request_id is None
                or fault.request_id == owner
                or fault.request_id in _ids(body)
            ):
                continue
            # every matching request counts, also for a fault that another one precedes: `nth` would
            # depend on the other faults of the plan
            self._seen[number] = self._seen.get(number, 0) + 1
            spent = fault.times is not None and self._done.get(number, 0) >= fault.times
            if self._is_due(number, fault) and not spent and due is None:
                self._done[number] = self._done.get(number, 0) + 1
                due = fault
                self.on_fault(fault, path)
        return due

    def count(self, number: int) -> tuple[int, int]:
        """Return to how many requests the fault was applied so far, and how many matched."""
        return self._done.get(number, 0), self._seen.get(number, 0)

    def _is_due(self, number: int, fault: WireFault) -> bool:
        if fault.nth:
            return self._seen[number] in fault.nth
        if fault.probability is not None:
            # a generator for each fault: adding one to a plan leaves the draws of the others alone
            draw = self._draws.setdefault(number, random.Random(f"{self.plan.seed}/{number}"))
            return draw.random() < fault.probability
        return True


def plan_summary(
    plan: FaultPlan, progress: Iterable[PlanProgress | None], waiting: Iterable[Action]
) -> Iterator[str]:
    """Yield a line for each fault and action: how often it happened.

    Args:
        plan: the plan.
        progress: that of each server.
        waiting: actions that did not happen.
    """
    servers = [faults for faults in progress if faults is not None]
    for number, fault in enumerate(plan.faults):
        counts = [faults.count(number) for faults in servers]
        applied = sum(applied for applied, _ in counts)
        matching = sum(matching for _, matching in counts)
        place = "" if fault.path == "*" else f" to {fault.path}"
        owner = "" if fault.request_id is None else f" with the id {fault.request_id!r}"
        yield (
            f"fault {number + 1} ({fault.do}): applied to {applied} of {matching}"
            f" requests{place}{owner}"
        )
    done = Counter(plan.actions) - Counter(waiting)
    for number, action in enumerate(plan.actions):
        when = action.when
        word = (
            "happened"
            if done[action] > 0
            else f"did not happen: {when.request!r} did not get that far"
        )
        done[action] -= 1  # of two equal actions the first is the one that happened
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
"""Fields that only these faults have: with another they would be ignored in silence."""


def _listed(data: Mapping[str, Any], name: str) -> Iterable[Any]:
    tables = data.get(name, [])
    if not isinstance(tables, list) or any(not isinstance(item, dict) for item in tables):
        raise UsageError(
            f"{name} must be a list of tables: in TOML one [[{name}]] for each, in JSON a list of"
            " objects."
        )
    return tables


def _unknown_kind(name: object, kinds: Iterable[StrEnum]) -> str:
    """Return the message for a ``do`` that does not exist, with the closest that does."""
    names = [str(kind) for kind in kinds]
    close = get_close_matches(str(name), names, 1)
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    return f"do={name!r} must be one of {names}.{suggestion}"


def _check_names(
    table: str, item: Mapping[str, Any], names: Iterable[str], required: Iterable[str]
) -> None:
    """Refuse a table that lacks a required field, or has an unknown one."""
    unknown = sorted(set(item) - set(names))
    if unknown:
        raise UsageError(
            f"{table} has no field {', '.join(map(repr, unknown))}; its fields are {sorted(names)}."
        )
    missing = [name for name in required if name not in item]
    if missing:
        raise UsageError(
            f"{table} needs {' and '.join(map(repr, missing))}; its fields are {sorted(names)}."
        )


def _wire_fault(number: int, item: Mapping[str, Any]) -> WireFault:
    title = f"Fault {number + 1}"
    _check_names(title, item, [attribute.name for attribute in fields(WireFault)], ["do"])
    if item["do"] not in list(WireFaultKind):
        raise UsageError(f"{title}: {_unknown_kind(item['do'], WireFaultKind)}")
    values = dict(item)
    # a field that is ignored would be a plan that does less than it says
    misplaced = sorted(
        name for name, kinds in _ONLY_OF.items() if name in values and values["do"] not in kinds
    )
    if misplaced:
        reasons = [f"{name} is only for {' and '.join(_ONLY_OF[name])}" for name in misplaced]
        raise UsageError(f"{title} ({values['do']}): {'; '.join(reasons)}.")
    if item.get("nth") == []:
        raise UsageError(
            f"{title}: nth=[] names no request. Leave it out to apply the fault to all that match."
        )
    values["do"] = WireFaultKind(values["do"])
    nth = item.get("nth", [])
    values["nth"] = tuple(nth) if isinstance(nth, list) else (nth,)
    try:
        return WireFault(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace("This fault", title, 1)) from error


def _action(number: int, item: Mapping[str, Any]) -> Action:
    title = f"Action {number + 1}"
    _check_names(title, item, [attribute.name for attribute in fields(Action)], ["do", "when"])
    if item["do"] not in ENGINE_ACTIONS:
        note = (
            ""
            if item["do"] not in list(ActionKind)
            else " A server does no other by itself: clients request other weight updates."
        )
        raise UsageError(f"{title}: {_unknown_kind(item['do'], ENGINE_ACTIONS)}{note}")
    if not isinstance(item["when"], dict):
        raise UsageError(
            f"{title}: when={item['when']!r} must be a table, such as {{ request = 'r1', tokens ="
            " 2 }."
        )
    _check_names(
        f"'when' of {title.lower()}",
        item["when"],
        [attribute.name for attribute in fields(Trigger)],
        ["request", "tokens"],
    )
    values = {**{f"when.{name}": value for name, value in item["when"].items()}, **item}
    rules: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("when.request", lambda value: isinstance(value, str), "a text"),
        ("when.tokens", lambda value: _is_integer(value, 0), "a whole number from 0"),
        ("when.queued", lambda value: isinstance(value, bool), "true or false"),
        ("when.race", lambda value: isinstance(value, bool), "true or false"),
        ("steps", lambda value: _is_integer(value, 0), "a whole number from 0"),
        ("server", lambda value: isinstance(value, str), "a text"),
    )
    problems = [
        f"{name}={values[name]!r} must be {words}."
        for name, fits, words in rules
        if name in values and not fits(values[name])
    ]
    if problems:
        raise UsageError(f"{title} cannot be planned:\n  - " + "\n  - ".join(problems))
    return Action(**{**item, "when": Trigger(**item["when"]), "do": ActionKind(item["do"])})


def _is_integer(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
