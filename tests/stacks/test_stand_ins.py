"""Stubs in ``sys.modules``: what is imported meanwhile is imported once, and no adapter replaces
modules in another way.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rollproof.stacks._support.stand_ins import stub_modules

HARNESS = Path(__file__).parents[2] / "harness"
COMPILED = """
from pathlib import Path

_runs = Path(__file__).with_name("runs")
if _runs.exists():
    # compiled modules that do not refuse end the process
    raise ImportError("cannot load a compiled module twice in one process")
_runs.touch()
import framework_engine
"""
PATCHES = re.compile(
    r"""patch\.dict\(\s*(in_dict\s*=\s*)?["']?sys\.modules  # takes out what was imported meanwhile
    |sys\.modules\.(pop|popitem|clear|update|setdefault)\(
    |sys\.modules\s*(\[[^\]]*\]|\|)?\s*=[^=]
    |del\s+sys\.modules""",
    re.VERBOSE,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path. Its modules are removed after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("compiled_package", "framework_engine", "framework_engine.part"):
        # so that the state before is restored after the test
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_modules_imported_during_a_stub_stay_and_are_executed_once(folder: Path) -> None:
    """As torch, which a framework's module imports at its head: the same object afterwards, also
    where that import fails.
    """
    (folder / "compiled_package.py").write_text(COMPILED, encoding="utf-8")
    engine = ModuleType("framework_engine")
    with pytest.raises(ZeroDivisionError), stub_modules({"framework_engine": engine}):
        within = importlib.import_module("compiled_package")
        assert engine is within.framework_engine
        raise ZeroDivisionError

    assert within is importlib.import_module("compiled_package")
    with stub_modules({"framework_engine": ModuleType("framework_engine")}):
        assert within is importlib.import_module("compiled_package")


def test_stubs_restore_the_modules_that_they_replaced(folder: Path) -> None:
    """A name that was imported before is that module again, and one that was not is to be
    imported.
    """
    (folder / "framework_engine.py").write_text("real = True\n", encoding="utf-8")
    names = {name: ModuleType(name) for name in ("framework_engine", "framework_engine.part")}
    with stub_modules(names):
        assert names["framework_engine"] is importlib.import_module("framework_engine")
        with stub_modules({"framework_engine": ModuleType("another")}):
            assert "another" == importlib.import_module("framework_engine").__name__
        assert names["framework_engine"] is importlib.import_module("framework_engine")

    real = importlib.import_module("framework_engine")
    assert real.real
    assert "framework_engine.part" not in sys.modules
    with stub_modules(names):
        assert real is not importlib.import_module("framework_engine")
    assert real is importlib.import_module("framework_engine")


def test_no_file_changes_the_modules_in_another_way() -> None:
    """Only ``rollproof.stacks._support.stand_ins`` writes to ``sys.modules``."""
    files = [
        path
        for path in HARNESS.rglob("*.py")
        if path != HARNESS / "stacks" / "_support" / "stand_ins.py"
    ]
    assert [] == [
        str(path.relative_to(HARNESS))
        for path in files
        if PATCHES.search(path.read_text(encoding="utf-8"))
    ]
    assert PATCHES.search(
        (HARNESS / "stacks" / "_support" / "stand_ins.py").read_text(encoding="utf-8")
    )


@pytest.mark.parametrize(
    "line",
    [
        "with mock.patch.dict(sys.modules, {name: module}):",
        "with mock.patch.dict('sys.modules', {name: module}):",
        "sys.modules[name] = module",
        "sys.modules |= {name: module}",
        "del sys.modules[name]",
        "sys.modules.pop(name, None)",
    ],
)
def test_each_kind_of_change_is_seen(line: str) -> None:
    """Each is seen; reading is not one."""
    assert PATCHES.search(line)
    assert not PATCHES.search("if sys.modules[name] == module or name in sys.modules:")
