"""Docstrings as Markdown: sections of names become lists or cells of a table."""

from __future__ import annotations

import inspect
import re

__all__ = ["described_fields", "markdown", "one_line"]

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
_ENTRY = re.compile(r"^    (?P<names>\*{0,2}\w+(?:, \w+)*): (?P<text>.*)$")


def one_line(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def described_fields(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return the text before the section ``Attributes``, and that of each field."""
    text, _, section = inspect.cleandoc(docstring or "").partition("\n\nAttributes:\n")
    fields: dict[str, str] = {}
    names: list[str] = []
    for line in section.split("\n"):
        if entry := _ENTRY.match(line):
            names = entry["names"].split(", ")
            fields |= dict.fromkeys(names, entry["text"])
        else:
            fields |= {name: f"{fields[name]} {line.strip()}" for name in names}
    return text, {name: one_line(meaning) for name, meaning in fields.items()}


def markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown.

    Sections such as ``Args`` become lists, and an indented block after ``::`` a fenced one.
    """
    out: list[str] = []
    section = code = False
    for line in inspect.cleandoc(docstring or "").split("\n"):
        if code and line and not line.startswith("    "):
            while out[-1] == "":
                out.pop()
            out += ["```", ""]
            code = False
        if heading := _SECTION.match(line):
            section = True
            out += [line, ""] if heading[1] != "Returns" else [line]
        elif section and (entry := _ENTRY.match(line)):
            out.append(f"- `{entry['names']}`: {entry['text']}")
        elif section and line.startswith("        "):
            out.append(f"  {line.strip()}")
        elif line.endswith("::"):
            out += [*([] if line == "::" else [line.removesuffix(":"), ""]), "```python"]
            code = True
        elif not (code and line == "" and out[-1] == "```python"):
            section = section and line.startswith("    ")
            out.append(line.removeprefix("    ") if code else line)
    text = "\n".join([*out, "```"] if code else out)
    return re.sub(r"(?<!`)``(?!`)", "`", text)
