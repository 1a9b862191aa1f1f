"""The texts of enums: the docstring of each enum of a module, and the text below each value; and
lists of terms, with the values of each.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import StrEnum
from types import ModuleType
from typing import Any

from tools.docs.docstrings import described_fields, one_line

__all__ = ["enum_texts", "term_lines"]


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


def term_lines(cls: type, module: ModuleType) -> Iterator[str]:
    """Yield a list of the fields of ``cls``, each with its default in brackets and the values of
    its enum of ``module``.

    An enum of several fields is listed at the first of them.
    """
    _, meanings = described_fields(cls.__doc__)
    enums = enum_texts(module)
    listed: dict[str, str] = {}
    for field in fields(cls):
        name = next((word for word in re.findall(r"\w+", str(field.type)) if word in enums), "")
        text, members = enums.get(name, ("", []))
        own = meanings.get(field.name, "")
        # the longer text says more; that of an enum is shown once
        meaning = own if name in listed else max(own, one_line(text), key=len)
        meaning = meaning.replace("\\|", "|")
        if not members:
            default = f"`{field.type}`"
            if field.default is not MISSING:
                default = f"`{field.type} = {_shown(field.default)}`"
        else:
            default = "required" if field.default is MISSING else f"`{_shown(field.default)}`"
        plain = not any(explained for _, explained in members)
        if members and name in listed:
            meaning += f" Values: as `{listed[name]}`."
        elif members and plain:
            meaning += f" Values: {', '.join(f'`{value}`' for value, _ in members)}."
        yield f"- **`{field.name}`** ({default}): {meaning}"
        if name not in listed and not plain:
            for value, explained in members:
                yield f"    - `{value}`{': ' + one_line(explained) if explained else ''}"
        listed.setdefault(name, field.name)


def _shown(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value) or "''"
