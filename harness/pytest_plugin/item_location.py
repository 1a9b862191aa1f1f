"""Where the test of an item is written."""

from __future__ import annotations

import pytest

from rollproof.core.source_location import SourceLocation, source_location

__all__ = ["item_location"]


def item_location(item: pytest.Item) -> SourceLocation:
    """Return the line of a test function, or of its class if a base class in another file has the
    function, as ``rollproof.RolloutConformance`` does.
    """
    file, line, _ = item.location
    if line is not None and (item.config.rootpath / file).resolve() == item.path.resolve():
        return SourceLocation(file=item.path, line=line + 1)
    owner = getattr(item, "cls", None)
    location = None if owner is None else source_location(owner)
    return location or SourceLocation(file=item.path, line=1)
