"""Public: the reference layouts of route rows and layers."""

from __future__ import annotations

from rollproof.layouts import (
    Alignment,
    Coding,
    Context,
    Fill,
    Layout,
    Mesh,
    Order,
    Rank,
    Side,
    Source,
    Stages,
    moe_layers,
)

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
