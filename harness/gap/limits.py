"""Limits: what a metric may be, by class of model and precision, each with its source; and the
verdict that follows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

from rollproof.core.files import read_toml
from rollproof.errors import GapError, UsageError
from rollproof.gap.intervals import Interval
from rollproof.gap.metrics import METRICS, Scale

__all__ = ["GapVerdict", "Limit", "Limits", "Side", "limits_named", "limits_of"]

DEFAULT = "moe-bf16"
"""The loosest class in common use: a run that fails here is wrong in every class but quantised
ones.
"""


class GapVerdict(StrEnum):
    """What the interval says about the limit."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class Side(StrEnum):
    """On which side of the limit a metric is wrong."""

    ABOVE = "above"
    BELOW = "below"
    BOTH = "both"


_HOPELESS = 1e5
"""Times an interval must become sharper, from which no number of tokens is told: that takes the
square of it as many.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """``target`` is what a healthy run of this class shows, ``warn`` what deserves a look, ``fail``
    what decides the verdict.
    """

    metric: str
    target: float
    warn: float
    fail: float
    source: str
    side: Side = Side.ABOVE

    def judge(self, interval: Interval) -> GapVerdict:
        """Fail where the whole interval lies beyond the limit, pass where none of it does,
        inconclusive where the limit lies within.

        A limit of exactly 0 tells exact from inexact: any value but 0 is beyond it.
        """
        if math.isnan(interval.value):
            return GapVerdict.INCONCLUSIVE
        if self.fail == 0.0:
            return GapVerdict.PASS if interval.value == 0.0 else GapVerdict.FAIL
        if math.isnan(interval.low) or math.isnan(interval.high):
            return GapVerdict.INCONCLUSIVE
        low, high = self._badness(interval)
        if low > self.fail if self.side is not Side.BELOW else low > -self.fail:
            return GapVerdict.FAIL
        return (
            GapVerdict.PASS
            if (high <= self.fail if self.side is not Side.BELOW else high <= -self.fail)
            else GapVerdict.INCONCLUSIVE
        )

    def _badness(self, interval: Interval) -> tuple[float, float]:
        """The interval turned so that larger is worse."""
        if self.side is Side.ABOVE:
            return interval.low, interval.high
        if self.side is Side.BELOW:
            return -interval.high, -interval.low
        inside = interval.low <= 0.0 <= interval.high
        return 0.0 if inside else min(abs(interval.low), abs(interval.high)), max(
            abs(interval.low), abs(interval.high)
        )

    def tokens_needed(self, interval: Interval, tokens: int) -> int | None:
        """About how many tokens, of sequences like these, would decide it; ``None`` where more
        tokens of the same kind would not.
        """
        if self.judge(interval) is not GapVerdict.INCONCLUSIVE:
            return tokens
        if math.isnan(interval.low) or math.isnan(interval.value):
            return None
        low, high = self._badness(interval)
        value = (
            -interval.value
            if self.side is Side.BELOW
            else abs(interval.value)
            if self.side is Side.BOTH
            else interval.value
        )
        bound = -self.fail if self.side is Side.BELOW else self.fail
        room = bound - value
        reach = (high - value) if room > 0 else (value - low)
        sharper = reach / room if room else math.inf
        return math.ceil(tokens * sharper**2) if sharper < _HOPELESS else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "target": self.target,
            "warn": self.warn,
            "fail": self.fail,
            "side": str(self.side),
            "source": self.source,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one class of model, by metric; ``temperature`` is that of the sampling which their
    sizes are for, ``None`` for any.
    """

    profile: str
    about: str
    limits: Mapping[str, Limit]
    temperature: float | None = None

    def judge(
        self, metric: str, interval: Interval, temperatures: Collection[float] = ()
    ) -> GapVerdict:
        """The verdict of a metric's limit, where tokens were sampled at ``temperatures``, as far as
        declared.

        A limit that is broken decides nothing where they are far colder than it is for, since 1 / T
        multiplies what numerics do to a logit; nor does that of E[rho] where tokens were chosen
        greedily, which is no draw. Exactness is exactness at any temperature.
        """
        limit = self.limits[metric]
        verdict = limit.judge(interval)
        if verdict is not GapVerdict.FAIL or limit.fail == 0.0:
            return verdict
        greedy = metric == "rho_mean_minus_1" and any(one == 0 for one in temperatures)
        return GapVerdict.INCONCLUSIVE if greedy or self.too_cold(temperatures) else verdict

    def too_cold(self, temperatures: Collection[float]) -> bool:
        """Whether tokens were sampled at less than half of the temperature that these limits are
        for; greedy ones do not count.
        """
        return self.temperature is not None and any(
            0 < one < self.temperature / 2 for one in temperatures
        )


def limits_of(limits: Any, *, override: Any = None) -> Limits:
    """The argument ``limits`` of a call, which names a profile or is one. Raises as
    ``limits_named`` does.
    """
    if isinstance(limits, Limits):
        if override is not None:
            raise UsageError(
                "limits is a profile already, which no limits_file adds to: give its name, or leave"
                " the file out."
            )
        return limits
    return limits_named(limits, override=override)


def limits_named(
    name: str | None = None, *, override: str | os.PathLike[str] | None = None
) -> Limits:
    """The profile ``name`` of the shipped limits (default ``moe-bf16``), or of the file
    ``override``.

    The file's limits replace those of the same profile and metric.

    Raises ``UsageError`` for a name that neither has, ``GapError`` for a file that cannot be read
    as limits.
    """
    if not isinstance(name, str | None):
        raise UsageError(f"limits={name!r} must be the name of a profile (moe-bf16), or a Limits.")
    if not isinstance(override, str | os.PathLike | None):
        raise UsageError(f"limits_file={override!r} must be a path.")
    shipped = _read(
        resources.files("rollproof.gap").joinpath("limits.toml").read_text(encoding="utf-8"),
        "the shipped limits",
    )
    own = {}
    if override is not None:
        try:
            own = _read(Path(override).read_text(encoding="utf-8"), os.fspath(override))
        except (OSError, ValueError) as error:
            if isinstance(error, GapError):
                raise
            raise GapError(f"The limits in {override} cannot be read: {error}.") from error
    known = shipped | own
    name = name or (next(iter(own)) if len(own) == 1 else DEFAULT)
    if name not in known:
        raise UsageError(f"No limits are named {name!r}. Choose one of {', '.join(known)}.")
    base = shipped.get(name)
    chosen = known[name]
    merged = {**(base.limits if base else {}), **chosen.limits}
    temperature = (
        chosen.temperature if chosen.temperature is not None or base is None else base.temperature
    )
    return Limits(profile=name, about=chosen.about, limits=merged, temperature=temperature)


def _read(text: str, where: str) -> dict[str, Limits]:
    try:
        data = read_toml(text)
    except ValueError as error:
        raise GapError(f"{where} is no TOML: {error}.") from error
    out = {}
    profiles = data.get("profile", {})
    for name, profile in profiles.items() if isinstance(profiles, dict) else ():
        if not isinstance(profile, dict) or not isinstance(profile.get("limits", {}), dict):
            raise GapError(f"{where}: write profile {name} as a [profile.{name}.limits] table.")
        limits = {
            metric: _limit(metric, entry, f"{where}, profile {name}")
            for metric, entry in profile.get("limits", {}).items()
        }
        out[name] = Limits(
            profile=name,
            about=str(profile.get("about", "")),
            limits=limits,
            temperature=_temperature(profile.get("temperature"), f"{where}, profile {name}"),
        )
    if not out:
        raise GapError(f"{where} holds no [profile.NAME.limits] table.")
    return out


def _temperature(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise GapError(
            f"{where}: temperature must be a finite number above 0, not {value!r}; leave it out"
            " where the limits hold at any."
        )
    return float(value)


def _limit(metric: str, entry: Any, where: str) -> Limit:
    from rollproof.gap.panel import GATED

    if metric not in GATED:
        raise GapError(
            f"{where}: no metric is named {metric!r}. Limits can be set for {', '.join(GATED)}."
        )
    if metric in METRICS and METRICS[metric].scale is Scale.BARE:
        raise GapError(
            f"{where}: {metric} takes no limit: a handful of tokens decides it, and no interval"
            " tells how well it is known."
        )
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("source"), str)
        or not entry["source"]
    ):
        raise GapError(
            f"{where}: {metric} needs target, warn, fail and a source that says where they come"
            " from."
        )
    stray = sorted(set(entry) - {"target", "warn", "fail", "source", "side"})
    if stray:
        raise GapError(
            f"{where}: {metric} has no {', '.join(stray)}; a limit has target, warn, fail, side and"
            " source."
        )
    numbers = {}
    for key in ("target", "warn", "fail"):
        value = entry.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise GapError(f"{where}: {metric}.{key} must be a finite number, not {value!r}.")
        numbers[key] = float(value)
    try:
        side = Side(entry.get("side", "above"))
    except ValueError:
        raise GapError(
            f"{where}: {metric}.side must be one of {[str(side) for side in Side]}, not"
            f" {entry['side']!r}."
        ) from None
    return Limit(metric=metric, source=entry["source"], side=side, **numbers)
