"""Layouts: which row of which sample, and which layer, goes to which rank of a trainer, and back.

Plain numpy, free of any framework. ``layout`` declares a whole layout, the modules beside it
compute its parts:

==============  ====================================================================
``padding``     final rows, padded batches, what stands in rows of no token
``packing``     cumulative lengths, alignment
``context``     zigzag and contiguous context parallelism
``slicing``     sequence parallelism, Ulysses, order of flattened rows
``layers``      which layers have a router, and which column is theirs
``stages``      pipeline ranks and their chunks
``schedules``   order of microbatches, forward and backward
``batches``     samples over data-parallel ranks and microbatches
``dtypes``      compact ids and their bytes
``merging``     recordings put together again
``payloads``    rows that carry their own identity
==============  ====================================================================
"""

from __future__ import annotations

from rollproof.layouts.context import Context
from rollproof.layouts.layers import moe_layers
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Mesh, Rank
from rollproof.layouts.packing import Alignment
from rollproof.layouts.padding import Fill, Side
from rollproof.layouts.payloads import Coding
from rollproof.layouts.slicing import Order
from rollproof.layouts.sources import Source
from rollproof.layouts.stages import Stages

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
