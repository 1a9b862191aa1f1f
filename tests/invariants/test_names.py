"""The name of a check's function or class is its id, so that a search for either finds the
other.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import rollproof.invariants
from rollproof.invariants import CHECKS
from rollproof.judging.checks import Check

_MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(
        rollproof.invariants.__path__, prefix="rollproof.invariants."
    )
]
_DEFINED = {
    name: (module.__name__.split(".")[2], value)
    for module in _MODULES
    for name, value in vars(module).items()
    if isinstance(value, Check)
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_the_name_of_a_check_is_its_id(check: Check) -> None:
    """``routes.rows`` is ``routes_rows`` in the folder ``routes``; a class has it in CamelCase."""
    name = check.id.replace(".", "_").replace("-", "_")

    family, found = _DEFINED[name]

    assert (check.family, check.id) == (family, found.id)
    assert getattr(found.request or found.trace, "__name__", None) in (
        name,
        "".join(part.capitalize() for part in name.split("_")),
    )


def test_every_check_that_is_defined_is_shipped() -> None:
    """A check that its family does not list would never run."""
    assert {check.id for _, check in _DEFINED.values()} == {check.id for check in CHECKS}
