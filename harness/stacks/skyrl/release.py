"""The releases of SkyRL that the adapters know, and what differs between them, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollproof.stacks.releases import Release

__all__ = ["RELEASE", "VERSIONS", "RouteForm", "SkyRLVersion"]


class RouteForm(StrEnum):
    """Type of the routes between SkyRL's client and its batch."""

    LISTS = "lists"
    """Nested lists, as its server's JSON has them."""
    ARRAYS = "arrays"
    """Numpy arrays of the smallest of uint8, int16 and int32 that fits, from bytes with shape and
    dtype.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyRLVersion:
    """What differs in a release.

    Fields:
        routes: Type of the routes.
        keeps_rows: On a later turn the generator asks for new rows only, and keeps those that it
            has. Before, the last turn's rows replaced all.
        takes_pad_id: The batch conversion takes the pad id, not a tokenizer.
        batch_dtype: The numpy types of the routes in a batch.
        packs_routes: Routing replay takes packed routes, a padding mask, and a token layout that is
            made once for a microbatch. Before, it took padded routes.
        route_padding: What replay fills padding rows with, a ``rollproof.layouts`` ``Fill``.
    """

    routes: RouteForm
    keeps_rows: bool
    takes_pad_id: bool
    batch_dtype: str
    packs_routes: bool
    route_padding: str


VERSIONS: Mapping[str, SkyRLVersion] = {
    "0.3.0": SkyRLVersion(
        routes=RouteForm.LISTS,
        keeps_rows=False,
        takes_pad_id=False,
        batch_dtype="uint8|int16",
        packs_routes=False,
        # a patch of Megatron's dispatcher accepts the repeated expert
        route_padding="zeros",
    ),
    "0.4.0": SkyRLVersion(
        routes=RouteForm.ARRAYS,
        keeps_rows=True,
        takes_pad_id=True,
        batch_dtype="uint8|int16|int32",
        packs_routes=True,
        route_padding="arange",
    ),
}
RELEASE = Release(
    stack="skyrl",
    distribution="skyrl",
    versions=tuple(VERSIONS),
    module_file="skyrl/train/generators/skyrl_gym_generator.py",
)
