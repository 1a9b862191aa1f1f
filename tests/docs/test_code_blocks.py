"""The code blocks of the pages run, page by page, in the order in which a reader takes them.

A ``console`` block runs its commands, and its other lines are in their output, in this order;
``...`` stands for any part of a line, or for lines. A ``python``, ``toml`` or ``diff`` block with a
title writes or changes that file. Any other ``python`` block runs in the namespace of its page.
``<!-- skip: next "why" -->`` before a block says why it cannot run.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import SkipTest

import pytest

sybil = pytest.importorskip("sybil", reason="sybil is not installed")

from sybil import Example, Sybil  # noqa: E402  # the skip comes first
from sybil.parsers.markdown import SkipParser  # noqa: E402
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([*(DOCS / "tutorials").glob("*.md"), *(DOCS / "how-to").glob("*.md")])
BLOCK = RawFencedCodeBlockLexer(
    re.compile(r'(?P<language>console|python|toml|diff)(?: title="(?P<title>[^"]+)")?\n')
)
PORT = "30000"
"""What pages call the port of a fake server; a free one is taken."""


class Shell:
    """What a reader has: a folder, a terminal, and a server in a second one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[str] | None = None
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = str(taken.getsockname()[1])
        scripts = str(Path(sys.executable).parent)
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST", "GITHUB", "COLUMNS")) and name != "CI"
        } | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, command: str) -> str:
        """What a command prints; a server goes on until the next one that reads its trace."""
        if command.startswith("pip install"):
            return ""
        if command.startswith(("rollproof serve", "rollproof check")):
            self.stop()
        command = command.replace(PORT, self.port)
        if command.startswith("rollproof serve") and "--run" not in command:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                # background runs ignore SIGINT, which a child would inherit
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )  # fmt: skip
            assert self.server.stdout is not None
            return self.server.stdout.readline().replace(self.port, PORT)
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.env, text=True, timeout=300,
            check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode in (0, 1, 2), done.stdout
        return done.stdout

    def stop(self) -> None:
        """Press Ctrl-C in the terminal of the server."""
        if self.server is not None:
            time.sleep(0.2)  # what a client reported last is on its way into the trace
            self.server.send_signal(signal.SIGINT)
            self.server.communicate(timeout=30)
            assert 0 == self.server.returncode
            self.server = None


def console(shell: Shell, text: str) -> None:
    """Run the commands of a block, and compare."""
    for part in text.split("$ ")[1:]:
        command, _, shown = part.partition("\n")
        printed = shell.run(command)
        rest = printed
        for line in shown.splitlines():
            if line.strip(". "):
                # the first match: the next line of the page is looked for behind it
                pattern = ".*".join(map(re.escape, line.split("...")))
                match = re.search(f"^{pattern}$", rest, re.MULTILINE)
                assert match, f"{command}: {line!r} in\n{printed}"
                rest = rest[match.end() :]


def write(shell: Shell, title: str, text: str) -> None:
    """Write a file; of one that exists, replace the statements that begin alike."""
    path = shell.folder / title.partition(":")[0]
    text = text.replace(PORT, shell.port)
    if ":" not in title:
        path.write_text(text, encoding="utf-8")
        return
    old, new = (
        {ast.get_source_segment(source, node).split("\n")[0]: ast.get_source_segment(source, node)
         for node in ast.parse(source).body}
        for source in (path.read_text("utf-8"), text)
    )  # fmt: skip
    changed = path.read_text("utf-8")
    for first, statement in new.items():
        if first in old:
            changed = changed.replace(old[first], statement)
        else:
            changed = changed.replace("\nimport rollproof\n", f"\nimport rollproof\n{statement}\n")
    path.write_text(changed, encoding="utf-8")


def change(shell: Shell, title: str, diff: str) -> None:
    """Replace the lines of a diff; they are in the file once."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    path = shell.folder / title
    text = path.read_text(encoding="utf-8")
    assert 1 == text.count(old), f"{title} has these lines {text.count(old)} times:\n{old}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def evaluate(example: Example) -> None:
    shell: Shell = example.namespace["shell"]
    language, title, text = (example.region.lexemes[key] for key in ("language", "title", "source"))
    match language, title:
        case "console", None:
            console(shell, text)
        case "diff", str():
            change(shell, title, text)
        case _, str():
            write(shell, title, text)
        case "python", None:
            exec(compile(text, f"{example.path}:{example.line}", "exec"), example.namespace)  # noqa: S102


def blocks(document: object) -> Iterator[object]:
    for region in BLOCK(document):
        region.evaluator = evaluate
        yield region


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """In an empty folder with the examples of docs/example, each does what the page says."""
    document = Sybil(parsers=[SkipParser(), blocks]).parse(page)
    folder = tmp_path / "folder"
    shutil.copytree(DOCS / "example", folder) if "how-to" in page.parts else folder.mkdir()
    shell = Shell(folder)
    fences = re.findall(
        r"^ *```(?:console|python|toml|diff)", page.read_text("utf-8"), re.MULTILINE
    )
    assert len(fences) == len(list(BLOCK(document))), "a block of this page is not recognised"
    document.namespace["shell"] = shell
    sys.path.insert(0, str(folder))
    try:
        for example in document.examples():
            try:
                example.evaluate()
            except SkipTest:
                continue
    finally:
        sys.path.remove(str(folder))
        if shell.server is not None:
            shell.server.kill()
            shell.server.communicate()
