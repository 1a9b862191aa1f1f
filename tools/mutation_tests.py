"""Which tests reach each line of the checks, and how they are run against a mutant.

The tests run once without a mutant, under ``coverage``, which notes for each line the tests that
reach it. A mutant is then tested by these alone, quick ones first, in a process that is forked from
one that has already imported everything but the package and its tests: most of the time of a small
test run are imports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

__all__ = ["Reached", "detects", "import_all", "main", "read", "record"]

PATHS = (
    "tests/invariants",
    "tests/judging",
    "tests/corrections",
    "tests/fakes/test_known_bugs.py",
    "tests/fakes/test_reference_batches.py",
    "tests/fakes/test_reference_clients.py",
    "tests/verification",
    "tests/odd_stacks",
)
"""The tests of the checks, and those that run checks on correct and on faulty stacks."""
_QUIET = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
# plugins are imported before pytest could rewrite them, for which it warns
_FORKED = (*_QUIET, "-x", "-W", "ignore::pytest.PytestAssertRewriteWarning")
_OWN_CODE = frozenset({"rollproof", "tests", "tools", "conftest", "__main__"})
_RAN = frozenset(
    {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
)
FIRST = 25
"""So many of the quickest tests run before any other: they detect most mutants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What a run without a mutant showed.

    lines: By module and line, the tests that reach it; none for a line that runs at import.
    seconds: How long each test took, under ``coverage``.
    imported: The modules that the tests import and that are not under test.
    failed: The tests that fail without a mutant; the others alone are in ``lines``.
    """

    lines: dict[str, dict[int, frozenset[str]]]
    seconds: dict[str, float]
    imported: tuple[str, ...]
    failed: tuple[str, ...]

    def tests_of(self, module: str, first: int, last: int) -> list[str]:
        """Return the tests that reach one of these lines, quick ones first."""
        lines = self.lines.get(module, {})
        # an expression over several lines may be noted at its first line only
        before = max((line for line in lines if line <= first), default=first)
        reached = frozenset[str]().union(*(lines.get(line, ()) for line in range(before, last + 1)))
        if not reached:
            # a line that runs at import, such as a constant, is reached by whatever uses the module
            reached = frozenset[str]().union(*lines.values())
        return sorted(reached, key=lambda test: self.seconds[test])


class _Recorder:
    """A pytest plugin that notes the lines that each test reaches."""

    def __init__(self, folder: Path, part: int, parts: int) -> None:
        self.part, self.parts = part, parts
        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[f"{folder}/rollproof/invariants/*"]
        )
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.sharing: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # tests that share a fixture stay in one part, where it is made once
        shared = {item.path for item in items if _shares_fixtures(item)}
        groups = dict.fromkeys(
            str(item.path) if item.path in shared else item.nodeid for item in items
        )
        mine = set(list(groups)[self.part :: self.parts])
        items[:] = [item for item in items if {str(item.path), item.nodeid} & mine]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        context = item.nodeid
        if _shares_fixtures(item):
            # the first test makes the fixture for all of them
            context = item.nodeid.partition("::")[0]
            self.sharing[context].append(item.nodeid)
        self.coverage.switch_context(context)
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - begin
            _forget_results()
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def result(self) -> dict[str, Any]:
        """Return what was noted, as JSON values."""
        data = self.coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            lines[str(Path(file).relative_to(self.folder))] = {
                line: [test for name in names for test in self.sharing.get(name, [name]) if test]
                for line, names in by_line.items()
            }
        imported = [name for name in sys.modules if name.partition(".")[0] not in _OWN_CODE]
        return {
            "lines": lines,
            "seconds": self.seconds,
            "imported": imported,
            "failed": self.failed,
        }


def _shares_fixtures(item: pytest.Item) -> bool:
    """Return whether a test has a fixture of ours that other tests of its module have, too."""
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs.values() if info else ()
    return any(d[-1].scope == "module" and d[-1].baseid for d in definitions)


def _forget_results() -> None:
    """Empty the caches of the tests' helpers: a later test that uses a result would not be seen to
    reach the lines that it comes from.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()


def record(file: Path, part: int, parts: int, paths: Sequence[str] = PATHS) -> None:
    """Run a part of the tests in the current folder, and write what they reached to ``file``.

    Nothing is written if pytest cannot run them.
    """
    recorder = _Recorder(Path.cwd(), part, parts)
    recorder.coverage.start()
    code = pytest.main([*_QUIET, *paths], plugins=[recorder])
    recorder.coverage.stop()
    if code in _RAN:
        file.write_text(json.dumps(recorder.result()), encoding="utf-8")


def read(files: Collection[Path]) -> Reached:
    """Read what ``record`` wrote, all parts together."""
    lines: dict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    seconds: dict[str, float] = {}
    imported: dict[str, None] = {}
    failed: list[str] = []
    for file in files:
        part = json.loads(file.read_text(encoding="utf-8"))
        for module, by_line in part["lines"].items():
            for line, tests in by_line.items():
                lines[module][int(line)].update(tests)
        seconds.update(part["seconds"])
        imported.update(dict.fromkeys(part["imported"]))
        failed.extend(part["failed"])
    return Reached(
        lines={
            module: {line: frozenset(tests.difference(failed)) for line, tests in by_line.items()}
            for module, by_line in lines.items()
        },
        seconds=seconds,
        imported=tuple(imported),
        failed=tuple(failed),
    )


def import_all(modules: Sequence[str]) -> None:
    """Import what the tests import beside the package, so that forked processes have it."""
    for module in modules:
        # a module may be one that only its package may import, or that a test made up
        with suppress(Exception):
            importlib.import_module(module)


def _run(tests: Sequence[str], seconds: float) -> bool:
    """Run tests in a forked process until the first fails; return whether one did.

    A run beyond ``seconds`` was stopped by an endless loop: that is detected, too.
    """
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(max(1, int(seconds)))
        code = 1
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            code = int(pytest.main([*_FORKED, *tests]))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return status != 0


def detects(tests: Sequence[str], reached: Reached) -> bool:
    """Return whether one of the tests fails in the current folder, whose checks are mutated."""
    quick, others = tests[:FIRST], tests[FIRST:]
    return any(
        _run(part, 60 + 5 * sum(reached.seconds[test] for test in part))
        for part in (quick, others)
        if part
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a part of the tests: one process of ``tools.mutation``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("paths", nargs="*", default=PATHS)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    options = parser.parse_args(arguments)
    record(options.file, options.part, options.parts, options.paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
