"""Lines of a localisation, for a person: where the two forwards part, and how the difference grows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollproof.reporting.text import Line, Style

if TYPE_CHECKING:
    from rollproof.gap.localise.localisation import Localisation
from rollproof.gap.phrases import counted

__all__ = ["localisation_lines"]

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
