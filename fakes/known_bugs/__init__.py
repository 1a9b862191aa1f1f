"""Known bugs: published faults of the field, each planted on a correct fake, which named checks
must detect.

Each module has one subject. ``rollproof known-bugs`` runs all bugs and prints which checks failed.
"""

from __future__ import annotations

from rollproof.errors import ExtraError
from rollproof.fakes.known_bugs import (
    adapters,
    batch_columns,
    batches,
    corrections,
    deltas,
    early_ends,
    engine_capture,
    engine_ends,
    engines,
    layout_layers,
    layout_ranks,
    layout_rows,
    layout_samples,
    lifecycle,
    logprobs_masks,
    mask_batches,
    own_stops,
    released_stacks,
    replay,
    routes,
    sample_sources,
    sampling_masks,
    stitch,
    trajectories,
    versions,
    weights,
)
from rollproof.fakes.known_bugs.known_bug import KnownBug

try:
    from rollproof.fakes.known_bugs import http_replies

    _HTTP_BUGS: tuple[KnownBug, ...] = http_replies.BUGS
except ExtraError:  # the extra `serve`: `rollproof checks` shows the others without it
    _HTTP_BUGS = ()

__all__ = ["KNOWN_BUGS"]

KNOWN_BUGS: tuple[KnownBug, ...] = (
    *stitch.BUGS,
    *trajectories.BUGS,
    *early_ends.BUGS,
    *sample_sources.BUGS,
    *own_stops.BUGS,
    *logprobs_masks.BUGS,
    *sampling_masks.BUGS,
    *routes.BUGS,
    *engine_capture.BUGS,
    *versions.BUGS,
    *weights.BUGS,
    *adapters.BUGS,
    *deltas.BUGS,
    *lifecycle.BUGS,
    *_HTTP_BUGS,
    *released_stacks.BUGS,
    *batches.BUGS,
    *batch_columns.BUGS,
    *mask_batches.BUGS,
    *layout_rows.BUGS,
    *layout_ranks.BUGS,
    *layout_layers.BUGS,
    *layout_samples.BUGS,
    *engines.BUGS,
    *engine_ends.BUGS,
    *replay.BUGS,
    *corrections.BUGS,
)
"""All known bugs, module by module; without the extra ``serve``, those of HTTP clients are left
out.
"""
