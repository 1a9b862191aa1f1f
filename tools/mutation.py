"""Mutation tests of the checks: change ``invariants/`` in one place at a time, and see whether any
test notices.

``nox -s mutation -- --sample 200 --seed 1`` tests that many mutants, drawn by the seed; ``--all``
tests every one, and ``--only stitch routes/shape`` draws from these modules alone. ``cosmic-ray``
makes the mutants. They are kept in a session file of its own format, so that an interrupted run
continues, and ``cr-html`` and ``cr-report`` read it.

A mutant is *detected* if a test of the checks or of the known bugs fails (``mutation_tests`` says
which tests reach it). One that survives is either explained in ``mutation_survivors.toml`` (no
trace can show it) or it shows what no test asserts.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

from tools import mutation_tests

__all__ = ["Explained", "chosen", "explanations", "main", "statement_at"]

ROOT = Path(__file__).parent.parent
SURVIVORS = Path(__file__).parent / "mutation_survivors.toml"
PACKAGES = ("invariants", "fakes", "gpu_suites")
"""Folders of the checkout that are sub-packages of ``rollproof``; ``harness`` is the package."""

OPERATORS = re.compile(
    "core/(ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE"
    "|GtE_Gt|GtE_Lt|Is_IsNot|IsNot_Is)"
    "|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Div_Mul|Mod_Add)"
    "|ReplaceUnaryOperator_Delete_(Not|USub)|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    "|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceBreakWithContinue|ReplaceContinueWithBreak"
    "|NumberReplacer|ZeroIterationForLoop)"
)
"""Operators of cosmic-ray that are used: one or two for each construct. Others make mutants that
no interpreter accepts (``<`` for ``is``), or that change annotations (``|``).
"""
NO_BEHAVIOUR = re.compile(r"TYPE_CHECKING|^@dataclass|^    @dataclass|strict=(True|False)\)")
"""Lines in which a mutant does not change what a check does."""
_reached: mutation_tests.Reached | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """A mutant that may survive, and why.

    module: The path of the module, from the root of the checkout.
    line: The line before the mutation, without indentation.
    operator: The name of cosmic-ray's operator, without ``core/``.
    why: Why no test can detect it.
    """

    module: str
    line: str
    operator: str
    why: str


def explanations(file: Path = SURVIVORS) -> tuple[Explained, ...]:
    """Return the mutants that ``mutation_survivors.toml`` explains."""
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("survivor", [])
    return tuple(Explained(**entry) for entry in entries)


def family_of(mutation: MutationSpec) -> str:
    """Return the family of checks that a mutant is in."""
    return mutation.module_path.parent.name


def line_of(mutation: MutationSpec, root: Path) -> str:
    """Return the line in which a mutant begins, without indentation."""
    lines = (root / mutation.module_path).read_text(encoding="utf-8").splitlines()
    return lines[mutation.start_pos[0] - 1].strip()


def statement_at(source: str, line: int) -> int:
    """Return the first line of the statement that a line of ``source`` is in."""
    return max(
        (
            node.lineno
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
        ),
        default=line,
    )


def make_checkout(folder: Path) -> None:
    """Copy what the tests need into ``folder``, with the package under its import name."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "harness", folder / "rollproof", ignore=ignored)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "rollproof" / name, ignore=ignored)
    for name in ("tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def chosen(items: Sequence[WorkItem], root: Path, count: int | None, seed: int) -> list[WorkItem]:
    """Return the mutants to test: those of ``OPERATORS``, or ``count`` of them drawn by a seed.

    Drawn over the sorted list, so that a seed means the same mutants on every machine.
    """

    def place(item: WorkItem) -> tuple[str, str, int]:
        (mutation,) = item.mutations
        return str(mutation.module_path), mutation.operator_name, mutation.occurrence

    useful = sorted(
        (
            item
            for item in items
            if OPERATORS.fullmatch(item.mutations[0].operator_name)
            and not NO_BEHAVIOUR.search(line_of(item.mutations[0], root))
        ),
        key=place,
    )
    return useful if count is None else random.Random(seed).sample(useful, min(count, len(useful)))


def _enter(folders: Path, unchanged: Path, notes: Sequence[Path]) -> None:
    """Give this worker process a checkout of its own, in which it writes its mutants."""
    global _reached
    folder = folders / f"worker-{os.getpid()}"
    # with the compiled files that are there: no mutant writes any, so that none is used for another
    shutil.copytree(unchanged, folder)
    sys.dont_write_bytecode = True
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    _reached = mutation_tests.read(notes)
    mutation_tests.import_all(_reached.imported)


def _unchanged_passes(_: int) -> bool:
    assert _reached is not None
    seconds = _reached.seconds
    passing = set(seconds).difference(_reached.failed)
    quick = sorted(passing, key=lambda test: seconds[test])
    return not mutation_tests.detects(quick[: mutation_tests.FIRST], _reached)


def _tested(item: WorkItem) -> tuple[str, WorkResult]:
    assert _reached is not None
    (mutation,) = item.mutations
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    with use_mutation(mutation.module_path, operator, mutation.occurrence) as (before, after):
        if after is None:
            return item.job_id, WorkResult(worker_outcome=WorkerOutcome.NO_TEST)
        # a condition over several lines may be decided before the line of its mutated operator
        first = statement_at(before, mutation.start_pos[0])
        tests = _reached.tests_of(str(mutation.module_path), first, mutation.end_pos[0])
        detected = mutation_tests.detects(tests, _reached)
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    return item.job_id, WorkResult(
        worker_outcome=WorkerOutcome.NORMAL,
        test_outcome=TestOutcome.KILLED if detected else TestOutcome.SURVIVED,
        output=f"{len(tests)} tests reach it",
        diff="\n".join(diff),
    )


def modules_of(root: Path, only: Sequence[str]) -> list[Path]:
    """Return the modules of the checks, from ``root``: all, or those whose path below
    ``invariants/`` begins with one of ``only``.
    """
    checks = root / "rollproof/invariants"
    return sorted(
        path.relative_to(root)
        for path in checks.rglob("*.py")
        if not only or path.relative_to(checks).as_posix().startswith(tuple(only))
    )


def _session(file: Path, root: Path, only: Sequence[str], count: int | None, seed: int) -> None:
    """Make the session file: the chosen mutants, none tested."""
    with use_db(str(file)) as database:
        modules = modules_of(root, only)
        here = Path.cwd()
        os.chdir(root)
        init(modules, database, {})
        os.chdir(here)
        items = chosen(list(database.work_items), root, count, seed)
        database.clear()
        database.add_work_items(items)


def _noted(folder: Path, jobs: int, tests: Sequence[str]) -> list[Path]:
    """Run the tests without a mutant; return the files that say which lines each one reaches.

    Raises:
        SystemExit: The tests cannot be run.
    """
    make_checkout(folder)
    inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *inherited])}
    notes = [folder.parent / f"reached-{part}.json" for part in range(jobs)]
    command = [sys.executable, "-m", "tools.mutation_tests"]
    processes = [
        subprocess.Popen(
            [*command, str(note), *tests, "--part", str(part), "--parts", str(jobs)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part, note in enumerate(notes)
    ]
    outputs = [process.communicate()[0] for process in processes]
    for process, output, note in zip(processes, outputs, notes, strict=True):
        if process.returncode or not note.exists():
            sys.exit(f"{output[-4000:]}\nThe tests cannot be run.")
    return notes


def test_mutants(file: Path, jobs: int, tests: Sequence[str]) -> None:
    """Test the mutants of a session file that have no result yet, and store each result.

    Raises:
        SystemExit: The tests cannot be run, or fail where nothing is changed.
    """
    with tempfile.TemporaryDirectory() as name, use_db(str(file), WorkDB.Mode.open) as database:
        pending = list(database.pending_work_items)
        begin = time.monotonic()
        folder = Path(name)
        print("Looking which lines each test reaches ...", file=sys.stderr)
        notes = _noted(folder / "unchanged", jobs, tests)
        print(f"... {time.monotonic() - begin:.0f} s", file=sys.stderr)
        # they would detect any mutant
        for test in mutation_tests.read(notes).failed:
            print(f"left out, since it fails without a mutant: {test}", file=sys.stderr)
        arguments = (folder, folder / "unchanged", notes)
        with ProcessPoolExecutor(jobs, initializer=_enter, initargs=arguments) as pool:
            if not all(pool.map(_unchanged_passes, range(jobs))):
                sys.exit("The tests fail in a worker without a mutant.")
            futures = [pool.submit(_tested, item) for item in pending]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    database.set_result(*future.result())
                    if sys.stderr.isatty() or done % 20 == 0 or done == len(pending):
                        elapsed = time.monotonic() - begin
                        print(f"{done} of {len(pending)} mutants, {elapsed:.0f} s", file=sys.stderr)
            except KeyboardInterrupt:
                # results are stored one by one, so the next run continues here
                pool.shutdown(wait=False, cancel_futures=True)
                print("Interrupted: run the command again to continue.", file=sys.stderr)


def _survivors(database: WorkDB) -> Iterator[tuple[MutationSpec, WorkResult]]:
    for item, result in database.completed_work_items:
        if not result.is_killed:
            yield item.mutations[0], result


def report(file: Path, known: Sequence[Explained]) -> int:
    """Print how many mutants were detected, by family, and those that survived without an
    explanation; return how many those are.
    """
    with use_db(str(file), WorkDB.Mode.open) as database, tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_checkout(root)
        tested = Counter(family_of(item.mutations[0]) for item, _ in database.completed_work_items)
        reasons = {(entry.module, entry.line, entry.operator): entry.why for entry in known}
        missed: Counter[str] = Counter()
        explained: Counter[str] = Counter()
        for mutation, result in sorted(
            _survivors(database), key=lambda pair: (str(pair[0].module_path), pair[0].start_pos)
        ):
            module = str(mutation.module_path).removeprefix("rollproof/")
            operator = mutation.operator_name.removeprefix("core/")
            if (module, line_of(mutation, root), operator) in reasons:
                explained[family_of(mutation)] += 1
                continue
            missed[family_of(mutation)] += 1
            print(f"{module}:{mutation.start_pos[0]} {operator}")
            changed = [
                line for line in (result.diff or "").splitlines() if re.match(r"[-+](?![-+])", line)
            ]
            print("".join(f"    {line}\n" for line in changed), end="")
    total = tested.total() - explained.total()
    for family in sorted(tested):
        count = tested[family] - explained[family]
        print(f"{family}: {count - missed[family]} of {count} detected")
    print(
        f"{total - missed.total()} of {total} mutants detected"
        f" ({100 * (total - missed.total()) / max(total, 1):.1f} %),"
        f" {explained.total()} explained survivors not counted"
    )
    return missed.total()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a session unless it exists, test its mutants, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sample", type=int, default=200, metavar="N", help="how many mutants")
    parser.add_argument("--all", action="store_true", help="test every mutant")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATH", help="such as stitch or routes/shape"
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=mutation_tests.PATHS,
        metavar="PATH",
        help="use these tests alone: quick, while a module is worked on",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--session", type=Path, default=Path("mutants.sqlite"))
    parser.add_argument(
        "--least", type=float, default=95.0, metavar="PERCENT", help="fail below this share"
    )
    options = parser.parse_args(arguments)
    if not options.session.exists():
        with tempfile.TemporaryDirectory() as name:
            make_checkout(Path(name))
            _session(
                options.session.absolute(),
                Path(name),
                options.only,
                None if options.all else options.sample,
                options.seed,
            )
    test_mutants(options.session, options.jobs, options.tests)
    missed = report(options.session, explanations())
    with use_db(str(options.session), WorkDB.Mode.open) as database:
        tested = database.num_results
    return int(100 * (tested - missed) < options.least * tested)


if __name__ == "__main__":
    sys.exit(main())
