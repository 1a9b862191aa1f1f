"""Known bugs: published faults of the field, each planted on a correct fake, which named checks must kill.

One module per subject; ``rollproof known-bugs`` runs them all and prints who saw what.
"""

from __future__ import annotations

from rollproof.fakes.known_bugs import (
    batch,
    capture,
    conversions,
    engines,
    layout_layers,
    layout_ranks,
    layout_rows,
    layout_samples,
    lifecycle,
    released,
    replay,
    routes,
    stitch,
    values,
    versions,
    weights,
    wire,
)
from rollproof.known_bug import KnownBug

__all__ = ["KNOWN_BUGS"]

KNOWN_BUGS: tuple[KnownBug, ...] = (
    *stitch.BUGS,
    *values.BUGS,
    *routes.BUGS,
    *capture.BUGS,
    *versions.BUGS,
    *weights.BUGS,
    *lifecycle.BUGS,
    *wire.BUGS,
    *released.BUGS,
    *batch.BUGS,
    *conversions.BUGS,
    *layout_rows.BUGS,
    *layout_ranks.BUGS,
    *layout_layers.BUGS,
    *layout_samples.BUGS,
    *engines.BUGS,
    *replay.BUGS,
)
"""All of them, family by family."""
