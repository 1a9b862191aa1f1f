"""The texts of enums: the docstring of each enum of a module, and the text below each value."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from enum import StrEnum
from types import ModuleType

__all__ = ["enum_texts"]


def enum_texts(module: ModuleType) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Return docstring and values of each enum that ``module`` defines, by the enum's name."""
    found = {}
    for node in ast.parse(inspect.getsource(module)).body:
        cls = getattr(module, node.name, None) if isinstance(node, ast.ClassDef) else None
        if isinstance(node, ast.ClassDef) and isinstance(cls, type) and issubclass(cls, StrEnum):
            found[node.name] = (inspect.cleandoc(cls.__doc__ or ""), list(_members(node)))
    return found


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    following = [*node.body[1:], None]
    for statement, after in zip(node.body, following, strict=True):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(inspect.cleandoc(str(after.value.value)).split())
            yield str(statement.value.value), text
