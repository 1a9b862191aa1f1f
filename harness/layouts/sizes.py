"""The parallel sizes, models and sequence lengths of layout cases.

The sizes of a case are pairwise distinct (miles#496 padded by the wrong one, and no test could tell
them apart), lengths straddle every multiple, and the smallest ones occur: one token, fewer tokens
than chunks, a stage without layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Mesh
from rollproof.layouts.pipeline import Stages, moe_layers

__all__ = [
    "ALONE",
    "LENGTHS",
    "draw_lengths",
    "draw_rows",
    "draw_stages",
    "small_rows",
    "small_stages",
    "with_model",
]

LENGTHS = ((1,), (2,), (5,), (12,), (1, 1), (2, 5), (7, 3), (13, 4), (3, 1, 8))
"""Lengths of samples in the small scope, in tokens."""
ALONE = 0.125
"""The share of random cases on one rank, for adapters of trainers that run on one."""
_PAIRS = ((1, 1), (2, 1), (1, 2), (1, 3), (2, 3), (3, 2))
"""Tensor and context-parallel sizes of the small scope."""
_PLAIN = Stages()
_STAGES: tuple[tuple[int, int, int, Stages], ...] = (
    (4, 1, 1, Stages()),
    (6, 3, 1, Stages()),
    (8, 2, 2, Stages()),
    (12, 2, 3, Stages()),
    (7, 3, 1, Stages(first=1)),
    (8, 3, 1, Stages(last=2)),
    (9, 4, 1, Stages(first=2, last=1)),
    (5, 3, 1, Stages(embedding=True)),
    (11, 3, 2, Stages(loss=True)),
    (10, 3, 2, Stages(embedding=True, loss=True)),
    (10, 3, 2, Stages(first=2, last=4)),
    (6, 3, 1, Stages(custom=((1,), (4,), (1,)))),
    (7, 3, 2, Stages(custom=((1, 2), (0, 1), (2, 1)))),
)
"""Layers, pipeline size, chunks and stages of the small scope: even, uneven, with embedding and
loss, custom, empty.
"""


def small_rows(layout: Layout) -> Iterator[Layout]:
    """Yield the layout on one rank, and under every pair of tensor and context-parallel sizes of
    the small scope, on a model of two layers.
    """
    yield with_model(layout, 2, {})
    for tp, cp in _PAIRS:
        yield with_model(
            layout,
            2,
            {
                # no size of the other axes, so that padding by the wrong one shows (miles#496)
                "dp": 5,
                "tp": tp,
                "cp": cp,
                "sequence_parallel": layout.mesh.sequence_parallel and tp > 1,
            },
        )


def small_stages(layout: Layout) -> Iterator[Layout]:
    """Yield the layout over pipelines of the small scope.

    MoE layers are all layers, every second one, and those after dense ones.
    """
    for (layers, pp, vpp, stages), pattern in product(_STAGES, (1, 2, 0)):
        moe = moe_layers(layers, pattern) if pattern else moe_layers(layers, 1, min(2, layers - 1))
        yield with_model(layout, layers, {"pp": pp, "vpp": vpp}, stages, moe)


def draw_rows(layout: Layout, random: np.random.Generator) -> Layout:
    """Draw tensor and context-parallel sizes up to 5 that differ from each other, or one rank."""
    if random.random() < ALONE:
        return with_model(layout, int(random.integers(1, 4)), {})
    dp, tp, cp = (int(size) for size in random.choice([1, 2, 3, 4, 5], 3, replace=False))
    sizes = {
        "dp": dp,
        "tp": tp,
        "cp": cp,
        "sequence_parallel": layout.mesh.sequence_parallel and tp > 1,
    }
    return with_model(layout, int(random.integers(1, 4)), sizes)


def draw_stages(layout: Layout, random: np.random.Generator) -> Layout:
    """Draw a pipeline of up to 5 ranks and 3 chunks over up to 24 layers, some of them MoE."""
    pp, vpp = int(random.integers(1, 6)), int(random.integers(1, 4))
    vpp = 1 if pp == 1 else vpp
    kind = random.choice(["even", "first", "both", "embedding", "custom"])
    share = vpp * int(random.integers(1, 3))
    if kind == "custom" and pp > 1:
        counts = random.integers(0, 4, (pp, vpp))
        counts[0, 0] += 1
        stages, layers = (
            Stages(custom=tuple(tuple(map(int, row)) for row in counts)),
            int(counts.sum()),
        )
    elif kind == "first" and pp > 1:
        first = vpp * int(random.integers(1, 3))
        stages, layers = Stages(first=first), first + share * (pp - 1)
    elif kind == "both" and pp > 2:
        stages, layers = Stages(first=vpp, last=2 * vpp), 3 * vpp + share * (pp - 2)
    elif kind == "embedding" and share * pp > 2:
        stages, layers = Stages(embedding=True, loss=True), share * pp - 2
    else:
        stages, layers = Stages(), share * pp
    pattern = (random.random(layers) < random.choice([0.5, 0.8, 1.0])).astype(int).tolist()
    # a model without any router would judge nothing
    pattern[int(random.integers(layers))] = 1
    return with_model(layout, layers, {"pp": pp, "vpp": vpp}, stages, moe_layers(layers, pattern))


def draw_lengths(random: np.random.Generator, most: int = 24) -> tuple[int, ...]:
    """Draw the lengths of one to four samples, in tokens."""
    return tuple(int(length) for length in random.integers(1, most + 1, random.integers(1, 5)))


def with_model(
    layout: Layout,
    layers: int,
    sizes: Mapping[str, Any],
    stages: Stages = _PLAIN,
    moe: tuple[int, ...] | None = None,
) -> Layout:
    """Return the conventions with other layers and sizes.

    All layers are MoE layers, unless ``moe`` names them; sizes that are not named are 1.
    """
    return replace(layout, num_layers=layers, moe_layers=moe, stages=stages, mesh=Mesh(**sizes))
