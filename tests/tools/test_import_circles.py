"""The search for circles of imports, on graphs written by hand."""

from __future__ import annotations

from tools.import_circles import circles


def test_modules_that_import_one_another_are_a_circle() -> None:
    """Each circle is reported once; a module that only imports a circle is not part of it."""
    imports = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a", "e"], "e": ["d"], "f": ["e"]}

    assert [["a", "b", "c"], ["d", "e"]] == sorted(circles(imports))


def test_a_diamond_is_no_circle() -> None:
    """Two ways to one module are none back."""
    assert [] == circles({"top": ["left", "right"], "left": ["low"], "right": ["low"], "low": []})
