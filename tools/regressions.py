r"""Puts published faults of a stack back into its fixed release, and records what rollproof says.

``python -m tools.regressions verl`` (slime and others: ``--checkout DIR``) copies the installed
package into a temporary folder, makes the edits of one fault of docs/regressions/verl.toml after
the other in the copy, judges it as ``rollproof verify`` does, and compares the verdicts with those
of the unchanged copy. ``--write`` stores the results in docs/regression_results, from which
docs/regressions.md is made; ``--only REFERENCE`` runs some faults.

Format of the files::

    version = "0.9.1"                # the release that the faults are put into

    [[fault]]
    reference = "verl#7158"          # where it was published
    what = "a resume ends in a TypeError if routes are numpy arrays"
    parts = ["client"]               # the parts of the stack that are judged
    flavours = ["vllm"]              # on these engine flavours; without it, on all
    subject = "module:Factory"       # or a subject that is judged instead of parts
    check = "lifecycle.no-error-without-fault"  # which must find it,
    kind = "a request failed"        # with a finding whose kind begins so,
    cause = "numpy|TypeError"        # and whose text matches this: it names the cause
    missed = "why"                   # instead, if rollproof is known to miss it

    [[fault.edit]]
    file = "verl/workers/rollout/llm_server.py"
    find = 'np\.concatenate\('       # a regular expression that matches once
    put = '__import__("torch").cat('

    [[not_planted]]                  # a published fault that is not put back
    reference = "verl#4248"
    what = "weights are not updated if the cache is not freed"
    why = "in the trainer's loop, which no part runs"
    in_scope = false                 # whether it concerns what rollproof judges
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollproof.core.files import read_toml
from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.stacks import release_of

__all__ = ["Edit", "Fault", "NotPlanted", "Regressions", "compared", "names_cause", "planted"]

DOCS = Path(__file__).parents[1] / "docs"
FAULTS, RESULTS = DOCS / "regressions", DOCS / "regression_results"
_LISTS = ("parts", "flavours")
_TIMEOUT = 1800
"""Most seconds of a run: a planted fault may make a stack hang in every case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One change: ``find``, a regular expression that matches once in ``file``, becomes ``put``,
    which may refer to its groups.
    """

    file: str
    find: str
    put: str

    def apply(self, text: str) -> str:
        """Return ``text`` with the change.

        Raises:
            UsageError: The expression matches another number of times, or changes nothing.
        """
        changed, count = re.subn(self.find, self.put, text)
        if count != 1 or changed == text:
            state = "changes nothing" if count == 1 else f"matches {count} times"
            raise UsageError(
                f"{self.find!r} {state} in {self.file}: it must match once. The release may have"
                " moved the code."
            )
        return changed


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A published fault and its edits; the fields are those of the format above."""

    reference: str
    what: str
    edits: tuple[Edit, ...]
    check: str
    kind: str = ""
    cause: str = ""
    parts: tuple[str, ...] = ()
    flavours: tuple[str, ...] = ()
    subject: str = ""
    missed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotPlanted:
    """A published fault that is not put back."""

    reference: str
    what: str
    why: str
    in_scope: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Regressions:
    """The faults of a stack, and the release that they are put into."""

    stack: str
    version: str
    faults: tuple[Fault, ...]
    not_planted: tuple[NotPlanted, ...]

    @classmethod
    def read(cls, stack: str, folder: Path = FAULTS) -> Self:
        """Read those of a stack.

        Raises:
            UsageError: There is no file, or it is malformed; the text lists every problem.
        """
        path = folder / f"{stack}.toml"
        if not path.is_file():
            names = ", ".join(sorted(file.stem for file in folder.glob("*.toml")))
            raise UsageError(f"No faults are listed for {stack!r}; there are files for: {names}.")
        try:
            data = read_toml(path.read_text(encoding="utf-8"))
            edits = [[Edit(**edit) for edit in fault.pop("edit", ())] for fault in data["fault"]]
            faults = tuple(
                Fault(
                    **{**fault, **{key: tuple(fault.get(key, ())) for key in _LISTS}},
                    edits=tuple(each),
                )
                for fault, each in zip(data["fault"], edits, strict=True)
            )
            others = tuple(NotPlanted(**each) for each in data.get("not_planted", ()))
            known = cls(stack=stack, version=data["version"], faults=faults, not_planted=others)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path.name} is not as tools/regressions.py says: {error}."
            ) from error
        if problems := known._problems():
            raise UsageError(f"{path.name} cannot be used:\n  - " + "\n  - ".join(problems))
        return known

    def _problems(self) -> list[str]:
        references = [each.reference for each in (*self.faults, *self.not_planted)]
        problems = [
            f"{reference} is listed twice"
            for reference in sorted(set(references))
            if references.count(reference) > 1
        ]
        for fault in self.faults:
            if not fault.edits:
                problems.append(f"{fault.reference} has no edit")
            if bool(fault.parts) == bool(fault.subject):
                problems.append(f"{fault.reference} must name parts or a subject")
            if fault.check not in default_registry().ids:
                problems.append(f"{fault.reference}: no check is named {fault.check}")
        return problems


def copied(stack: str, folder: Path, checkout: Path | None = None) -> None:
    """Copy the installed package of a stack, or its checkout, into ``folder``.

    Raises:
        UsageError: It is not installed.
    """
    leave = shutil.ignore_patterns(".git", "__pycache__")
    if checkout is not None:
        shutil.copytree(checkout, folder, ignore=leave, dirs_exist_ok=True)
        return
    package = release_of(stack).module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{stack} is not installed here: run `nox -s regressions -- {stack}`.")
    shutil.copytree(
        spec.submodule_search_locations[0], folder / package, ignore=leave, dirs_exist_ok=True
    )


@contextmanager
def planted(folder: Path, edits: Sequence[Edit]) -> Iterator[None]:
    """Make the edits in the files of ``folder`` until the context ends.

    Raises:
        UsageError: A file is missing, or an expression does not match once; nothing is changed.
    """
    before: dict[Path, str] = {}
    after: dict[Path, str] = {}
    for edit in edits:
        path = folder / edit.file
        if not path.is_file():
            raise UsageError(f"{edit.file} is not there. The release may have moved the code.")
        before.setdefault(path, path.read_text(encoding="utf-8"))
        after[path] = edit.apply(after.get(path, before[path]))
    try:
        _write(after)
        yield
    finally:
        _write(before)


def _write(texts: Mapping[Path, str]) -> None:
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        # Python compares the time of a change in whole seconds: two of them may fall into one.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def judged(stack: str, folder: Path, fault: Fault, seed: int) -> dict[str, Any]:
    """Return the JSON report of the code in ``folder``, in a process of its own.

    Raises:
        UsageError: It could not be judged; the text is what the run printed.
    """
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "report.json"
        target = ["--subject", fault.subject]
        if fault.parts:
            target = ["--stack", stack, "--checkout", str(folder), "--matrix"]
        options = [option for part in fault.parts for option in ("--part", part)]
        options += [option for name in fault.flavours for option in ("--flavour", name)]
        done = subprocess.run(  # noqa: S603 - rollproof itself
            [
                *(str(Path(sys.executable).with_name("rollproof")), "verify", "-j", "1"),
                *(*target, *options, "--seed", str(seed), "--json", str(file)),
                *("--witness-dir", str(Path(name) / "witnesses")),
            ],
            capture_output=True,
            text=True,
            # a subject imports the copy, like --checkout, before what is installed
            env={**os.environ, "PYTHONPATH": str(folder)},
            timeout=_TIMEOUT,
            check=False,
        )
        if done.returncode not in (0, 1, 2) or not file.is_file():
            raise UsageError(f"It could not be judged: {done.stderr.strip()[-800:]}")
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return report


def compared(
    baseline: Mapping[str, Any], report: Mapping[str, Any], fault: Fault
) -> dict[str, Any]:
    """Return what a report finds that the baseline does not, JSON-ready.

    Keys of the result:
        found: ``expected`` (the check of the fault, with that kind of finding), ``other`` checks or
            kinds, or ``nothing``.
        checks: The new kinds of findings by check, in the order in which they are printed.
        finding: Title, observation and hint of the first one of the expected check, or of the first
            check.
        seconds: How long the run took, without imports.
    """
    checks: dict[str, list[str]] = {}
    findings: dict[str, dict[str, Any]] = {}
    before = {_part(part): part for part in _parts(baseline)}
    for part in _parts(report):
        old = {check["id"]: check for check in before[_part(part)]["checks"]}
        for check in part["checks"]:
            for kind in _new_kinds(old.get(check["id"], {}), check):
                kinds = checks.setdefault(check["id"], [])
                kinds += [kind] * (kind not in kinds)
                for finding in check["findings"]:
                    if finding["kind"] == kind:
                        findings.setdefault(check["id"], finding)
    expected = any(kind.startswith(fault.kind) for kind in checks.get(fault.check, ()))
    first = findings.get(fault.check) or next(iter(findings.values()), {})
    text = {key: str(first.get(key, "")) for key in ("title", "expected", "observed", "hint")}
    return {
        "found": "expected" if expected else "other" if checks else "nothing",
        "checks": checks,
        "finding": text,
        "seconds": round(float(report["seconds"]), 1),
    }


def names_cause(fault: Fault, result: Mapping[str, Any]) -> bool:
    """Return whether the text of the first finding matches the ``cause`` of the fault."""
    text = "\n".join(result["finding"].values())
    return bool(fault.cause and re.search(fault.cause, text, re.IGNORECASE))


def _parts(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(report.get("reports", [report]))


def _part(report: Mapping[str, Any]) -> str:
    return str(report["recipe"].get("part", report["subject"]))


def _new_kinds(old: Mapping[str, Any], check: Mapping[str, Any]) -> list[str]:
    """The kinds of findings of a failed check that it did not have before, or not in a situation
    that excuses them.
    """
    if check["verdict"] not in ("fail", "expected fail"):
        return []
    return [
        kind
        for kind in check["kinds"]
        if kind not in old.get("kinds", {})
        or (kind in check["otherwise"] and kind not in old.get("otherwise", {}))
    ]


def run(
    regressions: Regressions, folder: Path, *, seed: int = 0, only: Sequence[str] = ()
) -> Iterator[tuple[Fault, dict[str, Any]]]:
    """Judge the copy in ``folder`` with each fault, or those in ``only``, and yield the results."""
    baselines: dict[tuple[str, ...], dict[str, Any]] = {}
    for fault in regressions.faults:
        if only and fault.reference not in only:
            continue
        key = (*(fault.parts or (fault.subject,)), *fault.flavours)
        if key not in baselines:
            baselines[key] = judged(regressions.stack, folder, fault, seed)
        with planted(folder, fault.edits):
            report = judged(regressions.stack, folder, fault, seed)
        yield fault, compared(baselines[key], report, fault)


def problem(fault: Fault, result: Mapping[str, Any]) -> str | None:
    """Say how a result differs from what the file says of the fault."""
    found = result["found"] == "expected"
    if fault.missed and found:
        return "it is found, though the file says that it is missed"
    if not fault.missed and not found:
        checks = ", ".join(result["checks"]) or "nothing"
        return f"{fault.check} does not find it; new: {checks}"
    if not fault.missed and not names_cause(fault, result):
        return f"{fault.check} finds it, but its finding does not name the cause"
    return None


def main(arguments: Sequence[str]) -> int:
    """Run the faults of a stack; returns 1 if one is not found as its file says."""
    parser = argparse.ArgumentParser(prog="python -m tools.regressions")
    parser.add_argument("stack")
    parser.add_argument("--checkout", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="REFERENCE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    code = 0
    try:
        regressions = Regressions.read(options.stack)
        with tempfile.TemporaryDirectory() as name:
            copied(options.stack, Path(name), options.checkout)
            for fault, result in run(regressions, Path(name), seed=options.seed, only=options.only):
                said = problem(fault, result)
                code = 1 if said else code
                sys.stdout.write(
                    f"{fault.reference}: {result['found']}, {', '.join(result['checks'])}"
                    f" ({result['seconds']} s){f': {said}' if said else ''}\n"
                )
                sys.stdout.flush()
                if options.write:
                    store(regressions, options.seed, fault, result)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return code


def store(regressions: Regressions, seed: int, fault: Fault, result: Mapping[str, Any]) -> None:
    """Write the result of a fault into the file of its stack, whose other results stay unless the
    release or the seed was another.
    """
    file = RESULTS / f"{regressions.stack}.json"
    head = {"stack": regressions.stack, "version": regressions.version, "seed": seed}
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    earlier = stored.pop("faults", {})
    results = {**(earlier if stored == head else {}), fault.reference: result}
    order = [each.reference for each in regressions.faults if each.reference in results]
    file.parent.mkdir(exist_ok=True)
    content = {**head, "faults": {name: results[name] for name in order}}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
