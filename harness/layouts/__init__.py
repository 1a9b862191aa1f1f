"""Reference layouts: which row of which sample, and which layer, goes to which rank of a trainer.

Plain numpy, free of any framework. ``layout`` declares a whole layout from these parts:

==============  ====================================================================
``padding``     final rows, padded batches, packed sequences, contents of padding
``row_slices``  context and sequence parallelism, Ulysses, order of flattened rows
``pipeline``    layers of stages and chunks, columns of layers, order of microbatches
``merged_rows`` recordings of ranks and of resumed calls, joined again
``sources``     where the rows of an array come from
``payloads``    rows that carry their own identity
==============  ====================================================================

``functions`` lists what a framework may have itself, and ``layout_cases`` the calls that test it.
"""

from __future__ import annotations

from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Mesh, Rank
from rollproof.layouts.padding import Alignment, Fill, Side
from rollproof.layouts.payloads import Coding
from rollproof.layouts.pipeline import Stages, moe_layers
from rollproof.layouts.row_slices import Context, Order
from rollproof.layouts.sources import Source

__all__ = [
    "Alignment",
    "Coding",
    "Context",
    "Fill",
    "Layout",
    "Mesh",
    "Order",
    "Rank",
    "Side",
    "Source",
    "Stages",
    "moe_layers",
]
