"""Pieces of other projects' own source, run as they stand: of an installed package without
importing it, or of a checkout.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["installed", "run_block", "run_function", "run_statements"]


def installed(package: str, file: str) -> Path | None:
    """The file of a package that is installed, or whose checkout is on the import path; ``None``
    where it is neither.
    """
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    return next(
        (
            path
            for folder in found.submodule_search_locations or ()
            if (path := Path(folder) / file).is_file()
        ),
        None,
    )


def run_function(path: Path, name: str, space: dict[str, Any]) -> Any:
    """The function of that name, at the top of the file, with ``space`` for its globals."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    node.decorator_list, node.returns = [], None
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    exec(compile(ast.Module([node], []), str(path), "exec"), space)  # noqa: S102 - their code, as it stands
    return space[name]


def run_block(path: Path, chosen: Callable[[str], bool], space: dict[str, Any]) -> dict[str, Any]:
    """The innermost ``if`` statement whose source is ``chosen``, run with ``space``, which is
    returned.
    """
    text = path.read_text(encoding="utf-8")
    blocks = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.If) and chosen(ast.get_source_segment(text, node) or "")
    ]
    node = min(blocks, key=lambda node: (node.end_lineno or 0) - node.lineno)
    exec(compile(ast.Module([node], []), str(path), "exec"), space)  # noqa: S102 - their code, as it stands
    return space


def run_statements(path: Path, first: str, last: str, space: dict[str, Any]) -> dict[str, Any]:
    """The statements of one body from the one that begins with ``first`` to that with ``last``, run
    with ``space``, which is returned.
    """
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        begun = (
            [ast.get_source_segment(text, line) or "" for line in body]
            if isinstance(body, list)
            else []
        )
        begin = next((i for i, line in enumerate(begun) if line.startswith(first)), None)
        end = next(
            (
                i
                for i, line in enumerate(begun)
                if begin is not None and i >= begin and line.startswith(last)
            ),
            None,
        )
        if end is not None and isinstance(body, list):
            exec(compile(ast.Module(body[begin : end + 1], []), str(path), "exec"), space)  # noqa: S102 - their code, as it stands
            return space
    raise LookupError(f"{path} has no statements from {first!r} to {last!r}")
