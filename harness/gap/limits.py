"""Limits of the metrics, by class of model and precision, with their sources; and the verdicts."""

from __future__ import annotations

import functools
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
from rollproof.gap.panel import GATED

__all__ = ["GapVerdict", "Limit", "Limits", "Side", "limits_named", "resolve_limits"]

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


# How many times narrower an interval may have to become. Beyond that no number of tokens is given:
# it grows with the square.
_MAX_SHARPER = 1e5


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The limit of one metric.

    Attributes:
        metric: its name.
        target: what a healthy run of this class shows.
        warn: what deserves a look.
        fail: what decides the verdict.
        source: where the numbers come from.
        side: on which side of the limit the metric is wrong.
    """

    metric: str
    target: float
    warn: float
    fail: float
    source: str
    side: Side = Side.ABOVE

    def judge(self, interval: Interval) -> GapVerdict:
        """Compare an interval with the limit.

        Fail if all of it lies beyond the limit, pass if none of it does, else inconclusive. A limit
        of exactly 0 demands exactness: any value but 0 is beyond it.
        """
        if math.isnan(interval.value):
            return GapVerdict.INCONCLUSIVE
        if self.fail == 0.0:
            return GapVerdict.PASS if interval.value == 0.0 else GapVerdict.FAIL
        # a value without an interval may be anything
        if math.isnan(interval.low) or math.isnan(interval.high):
            return GapVerdict.INCONCLUSIVE
        low, high = self._badness(interval)
        bound = -self.fail if self.side is Side.BELOW else self.fail
        if low > bound:
            return GapVerdict.FAIL
        return GapVerdict.PASS if high <= bound else GapVerdict.INCONCLUSIVE

    def looks_odd(self, interval: Interval) -> bool:
        """Whether a value within the limit is beyond ``warn``: no healthy run that we know of."""
        if self.judge(interval) is not GapVerdict.PASS:
            return False
        if self.side is Side.BELOW:
            return interval.value < self.warn
        size = abs(interval.value) if self.side is Side.BOTH else interval.value
        return size > self.warn

    def _badness(self, interval: Interval) -> tuple[float, float]:
        """The ends of the interval, turned so that larger is worse."""
        if self.side is Side.ABOVE:
            return interval.low, interval.high
        if self.side is Side.BELOW:
            return -interval.high, -interval.low
        sizes = abs(interval.low), abs(interval.high)
        contains_zero = interval.low <= 0.0 <= interval.high
        return 0.0 if contains_zero else min(sizes), max(sizes)

    def tokens_needed(self, interval: Interval, tokens: int) -> int | None:
        """Estimate how many tokens, in sequences like these, would decide it.

        ``None`` if more tokens of the same kind would not.
        """
        if self.judge(interval) is not GapVerdict.INCONCLUSIVE:
            return tokens
        if math.isnan(interval.low) or math.isnan(interval.value):
            return None
        low, high = self._badness(interval)
        value, bound = interval.value, self.fail
        if self.side is Side.BELOW:
            value, bound = -value, -bound
        elif self.side is Side.BOTH:
            value = abs(value)
        room = bound - value
        reach = (high - value) if room > 0 else (value - low)
        sharper = reach / room if room else math.inf
        # the width of an interval shrinks with the square root of the tokens
        return math.ceil(tokens * sharper**2) if sharper < _MAX_SHARPER else None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "target": self.target,
            "warn": self.warn,
            "fail": self.fail,
            "side": str(self.side),
            "source": self.source,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one class of model.

    Attributes:
        profile: the name of the class.
        about: what the class is.
        limits: the limits, by metric.
        temperature: the sampling temperature that they are for; ``None`` for any.
    """

    profile: str
    about: str
    limits: Mapping[str, Limit]
    temperature: float | None = None

    def judge(
        self, metric: str, interval: Interval, temperatures: Collection[float] = ()
    ) -> GapVerdict:
        """Judge a metric of tokens that were sampled at ``temperatures``, as far as declared."""
        limit = self.limits[metric]
        verdict = limit.judge(interval)
        if verdict is not GapVerdict.FAIL or limit.fail == 0.0:
            return verdict
        # 1 / T multiplies what numerics do to a logit, so a limit that is broken by far colder
        # tokens decides nothing; nor does E[rho] of greedy tokens, which are no draws. Exactness
        # (above) does not depend on the temperature.
        greedy = metric == "rho_mean_minus_1" and 0 in temperatures
        return GapVerdict.INCONCLUSIVE if greedy or self.too_cold(temperatures) else verdict

    def too_cold(self, temperatures: Collection[float]) -> bool:
        """Whether tokens were sampled at less than half of the limits' temperature.

        Greedy tokens do not count.
        """
        return self.temperature is not None and any(
            0 < temperature < self.temperature / 2 for temperature in temperatures
        )


def resolve_limits(limits: Any, *, override: Any = None) -> Limits:
    """Return the profile that the argument ``limits`` of a call names, or is.

    Raises as ``limits_named`` does.
    """
    if isinstance(limits, Limits):
        if override is not None:
            raise UsageError(
                "limits is a profile, so limits_file cannot add to it: give the profile's name, or"
                " leave the file out."
            )
        return limits
    return limits_named(limits, override=override)


def limits_named(
    name: str | None = None, *, override: str | os.PathLike[str] | None = None
) -> Limits:
    """Return a profile of the shipped limits, or of a file.

    Args:
        name: the profile (default ``moe-bf16``).
        override: a TOML file; its limits replace those of the same profile and metric.

    Raises:
        UsageError: no profile has that name.
        GapError: the file cannot be read as limits.
    """
    if not isinstance(name, str | None):
        raise UsageError(f"limits={name!r} must be the name of a profile (moe-bf16), or a Limits.")
    if not isinstance(override, str | os.PathLike | None):
        raise UsageError(f"limits_file={override!r} must be a path.")
    shipped = _shipped()
    own = {}
    if override is not None:
        try:
            own = _read(Path(override).read_text(encoding="utf-8"), os.fspath(override))
        except (OSError, ValueError) as error:
            if isinstance(error, GapError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise GapError(f"The limits in {override} cannot be read: {reason}.") from error
    profiles = {**shipped, **own}
    # a file with one profile needs no --limits
    name = name or (next(iter(own)) if len(own) == 1 else DEFAULT)
    if name not in profiles:
        raise UsageError(f"No limits are named {name!r}. Choose one of {', '.join(profiles)}.")
    profile, base = profiles[name], shipped.get(name)
    if base is None:
        return profile
    temperature = base.temperature if profile.temperature is None else profile.temperature
    return Limits(
        profile=name,
        about=profile.about,
        limits={**base.limits, **profile.limits},
        temperature=temperature,
    )


@functools.cache  # parsing takes longer than measuring a short file
def _shipped() -> Mapping[str, Limits]:
    text = resources.files("rollproof.gap").joinpath("limits.toml").read_text(encoding="utf-8")
    return _read(text, "the shipped limits")


def _read(text: str, source: str) -> dict[str, Limits]:
    try:
        data = read_toml(text)
    except ValueError as error:
        raise GapError(f"{source} is not TOML: {error}.") from error
    out = {}
    profiles = data.get("profile", {})
    for name, profile in profiles.items() if isinstance(profiles, dict) else ():
        if not isinstance(profile, dict) or not isinstance(profile.get("limits", {}), dict):
            raise GapError(f"{source}: write profile {name} as a [profile.{name}.limits] table.")
        limits = {
            metric: _limit(metric, entry, f"{source}, profile {name}")
            for metric, entry in profile.get("limits", {}).items()
        }
        out[name] = Limits(
            profile=name,
            about=str(profile.get("about", "")),
            limits=limits,
            temperature=_temperature(profile.get("temperature"), f"{source}, profile {name}"),
        )
    if not out:
        raise GapError(f"{source} holds no [profile.NAME.limits] table.")
    return out


def _temperature(value: Any, source: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise GapError(
            f"{source}: temperature must be a finite number above 0, not {value!r}; leave it out if"
            " the limits hold at any."
        )
    return float(value)


def _limit(metric: str, entry: Any, source: str) -> Limit:
    if metric not in GATED:
        raise GapError(
            f"{source}: no metric is named {metric!r}. Limits can be set for {', '.join(GATED)}."
        )
    if metric in METRICS and METRICS[metric].scale is Scale.BARE:
        raise GapError(
            f"{source}: {metric} takes no limit: a handful of tokens decides it, and no interval"
            " says how certain it is."
        )
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("source"), str)
        or not entry["source"]
    ):
        raise GapError(
            f"{source}: {metric} needs target, warn, fail and a source that says where they come"
            " from."
        )
    unknown = sorted(set(entry) - {"target", "warn", "fail", "source", "side"})
    if unknown:
        raise GapError(
            f"{source}: {metric} has no {', '.join(unknown)}; a limit has target, warn, fail, side"
            " and source."
        )
    numbers = {}
    for key in ("target", "warn", "fail"):
        value = entry.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise GapError(f"{source}: {metric}.{key} must be a finite number, not {value!r}.")
        numbers[key] = float(value)
    try:
        side = Side(entry.get("side", "above"))
    except ValueError:
        raise GapError(
            f"{source}: {metric}.side must be one of {[str(side) for side in Side]}, not"
            f" {entry['side']!r}."
        ) from None
    return Limit(metric=metric, source=entry["source"], side=side, **numbers)
