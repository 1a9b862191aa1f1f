"""Look for circles of imports: `python -m tools.import_circles` prints them and exits with 1.

Imports inside functions and those for type checkers alone count, too. import-linter compares
siblings only, so that a circle between two modules of one package would pass it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

__all__ = ["circles", "main"]


def circles(imports: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the sets of modules that import one another, each sorted (Tarjan's algorithm).

    ``imports`` has every module, and for each the modules that it imports.
    """
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for imported in sorted(imports[module]):
            if imported not in index:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], index[imported])
        if lowest[module] == index[module]:
            start = stack.index(module)
            if len(stack) > start + 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for module in sorted(imports):
        if module not in index:
            visit(module)
    return found


def main() -> int:
    """Print the circles of the installed package, one a line, and return the exit code."""
    import grimp

    graph = grimp.build_graph("rollproof", cache_dir=None)
    found = circles(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    for circle in found:
        print("circle of imports:", ", ".join(circle))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
