"""Docstrings that list the fields of a class: each of them is one that the class has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("harness", "fakes", "invariants", "gpu_suites", "tools", "tests")
ENTRY = re.compile(r"([a-z_][a-z0-9_]*(?:, [a-z_][a-z0-9_]*)*): \S")


def listed(docstring: str) -> Iterator[str]:
    """The names of lists such as ``server: Its server.``: a list follows an empty line, and only
    further entries and indented lines go on with it.
    """
    within = False
    before = ""
    for line in docstring.split("\n"):
        entry = ENTRY.match(line)
        within = (bool(entry) and (within or not before)) or (within and line.startswith("    "))
        if within and entry:
            yield from entry[1].split(", ")
        before = line


def names_of(cls: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Everything that a class and its bases define, assign to ``self``, or take when made."""
    names: set[str] = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            names.update(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id in classes and base.id != cls.name:
            names |= names_of(classes[base.id], classes)
    return names


def missing(sources: dict[str, str]) -> list[str]:
    """The listed names that their class does not have, as ``file: Class.name``."""
    found = {
        path: [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        for path, text in sources.items()
    }
    classes = {cls.name: cls for defined in found.values() for cls in defined}
    return [
        f"{path}: {cls.name}.{name}"
        for path, defined in found.items()
        for cls in defined
        if (names := set(listed(ast.get_docstring(cls) or "")))
        for name in sorted(names - names_of(cls, classes))
    ]


def test_every_field_that_a_docstring_lists_exists() -> None:
    """A field that was renamed is renamed in its description, too."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 500
    sources = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}
    assert [] == missing(sources)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("One call.", "", "server: Its server.", "left: Its end."), ["a.py: Call.left"]),
        (("One call.", "", "server, left: Both."), ["a.py: Call.left"]),
        (("One call.", "", "server: Its server,", "    left: in the text."), []),
        (("Waits as long as there is something", "left: work, or calls.",), []),
    ],
)  # fmt: skip
def test_a_list_is_told_from_a_sentence(lines: tuple[str, ...], expected: list[str]) -> None:
    """A sentence may have a colon; an entry of a list begins a line after an empty one."""
    text = "\n    ".join(('class Call:\n    """' + lines[0], *lines[1:], '"""', "server: str"))
    assert missing({"a.py": text}) == expected
