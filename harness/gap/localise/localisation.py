"""Localisation: what is known of where two forwards part, as records
(``rollproof.gap.localise.localise`` makes them).
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

__all__ = ["FEW", "Localisation", "Parting", "SiteGap", "localisation_lines"]

FEW: int = 2
"""Fewer tokens than this, beyond rounding at a site, are chance (a near-tie, a coincidence)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SiteGap:
    """One site on both sides: relative to the root mean square of the first side's values.

    ``alone`` is what this place does differently when it is given the first side's values, and
    ``rounding`` what rounding may do to it; ``carried`` and ``carried_rounding`` are the same with
    each side left to its own values, ``replayed`` with the first side's experts replayed as well
    (NaN where that was not run). ``tokens`` part here by more than rounding, ``beyond`` times on
    the median.
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
        return self.tokens >= FEW


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """A place where the forwards part: the module's names on either side, the experts concerned
    where they can be told, in words.
    """

    layer: int | None
    role: str
    module: str
    other_module: str
    experts: tuple[int, ...]
    because: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
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
    """Where two forwards of ``n_tokens`` tokens part. ``sites`` are in the order of the first
    forward.

    ``unmatched`` are modules that only one side has, or whose rows could not be told: nothing is
    known of them. ``led`` is false where the second side was not led: then only the first site of
    ``partings`` means its own module, since all later ones inherit its difference.
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
        """Every place that parts by more than rounding, in order; only the first where the second
        side was not led.
        """
        wrong = {gap.site for gap in self.sites if gap.parts}
        # other logits give other weights and other experts
        led_to = {
            Site(layer=site.layer, role=role)
            for site in wrong
            if site.role == "router"
            for role in ("selection", "gates")
        }
        led_to |= {
            Site(layer=site.layer, role="gates") for site in wrong if site.role == "selection"
        }
        found = [self._parting(gap) for gap in self.sites if gap.parts and gap.site not in led_to]
        return tuple(found if self.led else found[:1])

    @property
    def found(self) -> Parting | None:
        """The first place where they part; ``None`` where rounding explains everything."""
        return next(iter(self.partings), None)

    @property
    def growth(self) -> tuple[SiteGap, ...]:
        """The residual stream before each layer and behind the last: how the difference grows with
        depth.
        """
        return tuple(gap for gap in self.sites if gap.site.role == "residual")

    def _parting(self, gap: SiteGap) -> Parting:
        which = f", experts {', '.join(map(str, gap.experts))}" if len(gap.experts) > 1 else ""
        which = f", expert {gap.experts[0]}" if len(gap.experts) == 1 else which
        given = "given the other side's values, " if self.led else ""
        return Parting(
            layer=gap.site.layer if 0 <= gap.site.layer < 1 << 30 else None,
            role=gap.site.role,
            module=gap.module,
            other_module=gap.other_module,
            experts=gap.experts,
            because=(
                f"{gap.site}{which}: {given}{gap.tokens:,} of {counted(self.n_tokens, 'token')} are"
                f" {gap.beyond:.3g} times as far apart as rounding puts them (relative difference"
                f" {gap.alone:.2g}, rounding {gap.rounding:.2g})"
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""

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
_MOST = 8


def localisation_lines(localisation: Localisation) -> Iterator[Line]:
    """Where the forwards part and by how much, the growth with depth, and what could not be
    matched; within 120 columns.
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
    for parting in partings[:_MOST]:
        yield Style.BAD, _wrapped(f"  parts at {parting.because}", " " * 11)
        names = (
            parting.module
            if parting.module == parting.other_module
            else f"{parting.module} and {parting.other_module}"
        )
        yield Style.PLAIN, _wrapped(f"{' ' * 11}{names}", " " * 11)
    if len(partings) > _MOST:
        yield Style.PLAIN, f"  and at {len(partings) - _MOST} further places"
    yield (
        Style.FAINT,
        _ROW.format("relative difference", "own values", "replayed", "rounding").rstrip(),
    )
    for gap in localisation.growth:
        yield (
            Style.FAINT,
            _ROW.format(
                str(gap.site), _told(gap.carried), _told(gap.replayed), _told(gap.carried_rounding)
            ).rstrip(),
        )
    if localisation.unmatched:
        yield (
            Style.DOUBT,
            _wrapped(f"  not compared: {', '.join(localisation.unmatched[:12])}", " " * 8),
        )


def _told(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "-"


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
