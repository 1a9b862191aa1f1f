"""Importing: modules that stand in for others while a framework's own are imported.

Whoever needs stand-ins in ``sys.modules`` puts them there with ``standing_in``, never with
``mock.patch.dict(sys.modules, ...)``: that takes out, on leaving, whatever was imported meanwhile.
A compiled package (torch) is then initialised again by its next import, which ends the process with
a segmentation fault, or leaves two sets of its types behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

__all__ = ["standing_in"]


@contextmanager
def standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Within, each name imports as the module that is given for it; behind it, as what it was
    before.

    Only these names are put in and taken out. What else is imported meanwhile stays, so that it is
    executed once a process.
    """
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is not None:
                sys.modules[name] = earlier
            else:
                sys.modules.pop(name, None)
