"""Records of where two forwards part, and their text lines.

``rollproof.gap.localise.localise`` makes them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.gap.column_checks import counted
from rollproof.gap.localise.sites import Site
from rollproof.reporting.text import Line, Style

__all__ = ["MIN_TOKENS", "Localisation", "Parting", "SiteGap", "localisation_lines"]

MIN_TOKENS: int = 2
"""Tokens beyond rounding from which a site parts; fewer are chance (a near-tie, a coincidence)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SiteGap:
    """One site on both sides, relative to the root mean square of the first side's values.

    Attributes:
        site: the place.
        module: the first side's module.
        other_module: the second side's module.
        alone: the difference if this place is given the first side's values.
        rounding: what rounding may do to it.
        tokens: tokens that are apart here by more than rounding.
        beyond: by how many times, on the median.
        carried: the difference with each side's own values.
        carried_rounding: what rounding may do to that.
        replayed: the difference with the first side's experts replayed; NaN if that was not run.
        experts: the experts concerned, if they are few.
    """

    site: Site
    module: str
    other_module: str
    alone: float
    rounding: float
    tokens: int
    beyond: float
    carried: float = float("nan")
    carried_rounding: float = float("nan")
    replayed: float = float("nan")
    experts: tuple[int, ...] = ()

    @property
    def parts(self) -> bool:
        """Whether enough tokens are apart here by more than rounding."""
        return self.tokens >= MIN_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """A place at which the forwards part.

    Attributes:
        layer: its layer; ``None`` outside of the layers.
        role: what is computed there.
        module: the first side's module.
        other_module: the second side's module.
        experts: the experts concerned, if they are few.
        because: the finding in words.
    """

    layer: int | None
    role: str
    module: str
    other_module: str
    experts: tuple[int, ...]
    because: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "layer": self.layer,
            "role": self.role,
            "module": self.module,
            "other_module": self.other_module,
            "experts": list(self.experts),
            "because": self.because,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Localisation:
    """Where two forwards part.

    Attributes:
        first: name of the first side.
        second: name of the second side.
        n_tokens: tokens that were compared.
        sites: the places, in the order of the first forward.
        unmatched: modules that only one side has, or with rows that could not be matched; they were
            not compared.
        led: whether the second side was led. If not, later sites inherit the difference of the
            first that parts.
        replayed: whether the second side was also run with the first's experts.
    """

    first: str
    second: str
    n_tokens: int
    sites: tuple[SiteGap, ...]
    unmatched: tuple[str, ...] = ()
    led: bool = True
    replayed: bool = False

    @property
    def partings(self) -> tuple[Parting, ...]:
        """The places that part by more than rounding, in order.

        Only the first one if the second side was not led.
        """
        wrong = {gap.site for gap in self.sites if gap.parts}
        # other logits give other weights and other experts
        consequences = {
            Site(layer=site.layer, role=role)
            for site in wrong
            if site.role == "router"
            for role in ("selection", "gates")
        }
        consequences |= {
            Site(layer=site.layer, role="gates") for site in wrong if site.role == "selection"
        }
        partings = [
            self._parting(gap) for gap in self.sites if gap.parts and gap.site not in consequences
        ]
        return tuple(partings if self.led else partings[:1])

    @property
    def found(self) -> Parting | None:
        """The first place where they part; ``None`` if rounding explains everything."""
        return next(iter(self.partings), None)

    @property
    def growth(self) -> tuple[SiteGap, ...]:
        """The residual stream before each layer and after the last one."""
        return tuple(gap for gap in self.sites if gap.site.role == "residual")

    def _parting(self, gap: SiteGap) -> Parting:
        experts = ""
        if gap.experts:
            plural = "s" if len(gap.experts) > 1 else ""
            experts = f", expert{plural} {', '.join(map(str, gap.experts))}"
        condition = "given the other side's values, " if self.led else ""
        return Parting(
            layer=gap.site.layer if 0 <= gap.site.layer < 1 << 30 else None,
            role=gap.site.role,
            module=gap.module,
            other_module=gap.other_module,
            experts=gap.experts,
            because=(
                f"{gap.site}{experts}: {condition}{gap.tokens:,} of"
                f" {counted(self.n_tokens, 'token')} are {gap.beyond:.3g} times as far apart as"
                f" rounding puts them (relative difference {gap.alone:.2g}, rounding"
                f" {gap.rounding:.2g})"
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""

        def number(value: float) -> float | None:
            return float(value) if np.isfinite(value) else None

        rows = [
            {
                "site": str(gap.site),
                "module": gap.module,
                "other_module": gap.other_module,
                **{
                    name: number(getattr(gap, name))
                    for name in (
                        "alone",
                        "rounding",
                        "beyond",
                        "carried",
                        "carried_rounding",
                        "replayed",
                    )
                },
                "tokens": gap.tokens,
                "parts": gap.parts,
            }
            for gap in self.sites
        ]
        return {
            "first": self.first,
            "second": self.second,
            "n_tokens": self.n_tokens,
            "led": self.led,
            "found": self.found.to_dict() if self.found else None,
            "partings": [parting.to_dict() for parting in self.partings],
            "sites": rows,
            "unmatched": list(self.unmatched),
        }


_WIDTH = 118
_ROW = "  {:<28} {:>12} {:>12} {:>12}"
_MAX_PARTINGS = 8


def localisation_lines(localisation: Localisation) -> Iterator[Line]:
    """Yield where the forwards part, the growth with depth, and what could not be matched.

    The lines are within 120 columns.
    """
    yield (
        Style.TITLE,
        _wrapped(
            f"{localisation.first} and {localisation.second} "
            f" [{counted(localisation.n_tokens, 'token')}, module by module]",
            "    ",
        ),
    )
    partings = localisation.partings
    if not partings:
        yield Style.GOOD, "  nowhere do they part by more than rounding"
    for parting in partings[:_MAX_PARTINGS]:
        yield Style.BAD, _wrapped(f"  parts at {parting.because}", " " * 11)
        names = (
            parting.module
            if parting.module == parting.other_module
            else f"{parting.module} and {parting.other_module}"
        )
        yield Style.PLAIN, _wrapped(f"{' ' * 11}{names}", " " * 11)
    if len(partings) > _MAX_PARTINGS:
        yield Style.PLAIN, f"  and at {len(partings) - _MAX_PARTINGS} further places"
    yield (
        Style.FAINT,
        _ROW.format("relative difference", "own values", "replayed", "rounding").rstrip(),
    )
    for gap in localisation.growth:
        yield (
            Style.FAINT,
            _ROW.format(
                str(gap.site),
                _short(gap.carried),
                _short(gap.replayed),
                _short(gap.carried_rounding),
            ).rstrip(),
        )
    if localisation.unmatched:
        yield (
            Style.DOUBT,
            _wrapped(f"  not compared: {', '.join(localisation.unmatched[:12])}", " " * 8),
        )


def _short(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "-"


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
