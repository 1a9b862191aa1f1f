"""Mutation tests of the checks: change ``invariants/`` in one place at a time, and see whether any
test notices.

``nox -s mutation -- --sample 200 --seed 1`` tests that many mutants, drawn by the seed; ``--all``
tests every one, and ``--only stitch routes/shape`` draws from these modules alone. ``cosmic-ray``
makes the mutants. They are kept in a session file of its own format, so that an interrupted run
continues, and ``cr-html`` and ``cr-report`` read it.

A mutant is *detected* if a test of the checks or of the known bugs fails. One that survives is
either explained in ``mutation_survivors.toml`` (no trace can show it) or it shows what no test
asserts.
"""

from __future__ import annotations

import argparse
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
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, WorkItem, WorkResult

__all__ = ["Explained", "chosen", "explanations", "main", "tests_of"]

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
TIMEOUT_S = 600.0


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


def tests_of(family: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands, without Python itself, that test the checks of a family, quick ones
    first.
    """
    pytest = ("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider")
    own = ["tests/invariants/" + family] if (ROOT / "tests/invariants" / family).is_dir() else []
    more = {
        "layout": ["tests/verification/test_layouts.py"],
        "engine": ["tests/verification/test_engines.py"],
        "replay": ["tests/verification/test_replay.py"],
        "batch": ["tests/verification/test_batches.py"],
    }
    own += [path for path in more.get(family, []) if (ROOT / path).exists()]
    commands = [(*pytest, *own)] if own else []
    known_bugs = (*pytest, "tests/fakes/test_known_bugs.py")
    return (*commands, known_bugs, (*pytest, "tests/invariants", "tests/judging"))


def family_of(mutation: MutationSpec) -> str:
    """Return the family of checks that a mutant is in."""
    return mutation.module_path.parent.name


def line_of(mutation: MutationSpec, root: Path) -> str:
    """Return the line in which a mutant begins, without indentation."""
    lines = (root / mutation.module_path).read_text(encoding="utf-8").splitlines()
    return lines[mutation.start_pos[0] - 1].strip()


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


def _enter(folders: Path) -> None:
    """Give this worker process a checkout of its own, in which it writes its mutants."""
    folder = folders / f"worker-{os.getpid()}"
    make_checkout(folder)
    os.chdir(folder)
    inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *inherited])
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def _tested(item: WorkItem) -> tuple[str, WorkResult]:
    family = family_of(item.mutations[0])
    command = f"{sys.executable} -m tools.mutation --test {family}"
    return item.job_id, mutate_and_test(item.mutations, command, TIMEOUT_S)


def run_tests(family: str) -> int:
    """Run the tests of a family in the current folder; stop at the first command that fails."""
    for command in tests_of(family):
        code = subprocess.run([sys.executable, *command], check=False).returncode
        if code:
            return code
    return 0


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


def _passes(family: str) -> tuple[str, bool]:
    command = [sys.executable, "-m", "tools.mutation", "--test", family]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        print(result.stdout[-2000:], result.stderr[-2000:], file=sys.stderr)
    return family, result.returncode == 0


def test_mutants(file: Path, jobs: int) -> None:
    """Test the mutants of a session file that have no result yet, and store each result.

    Raises:
        SystemExit: The tests fail without a mutant, so they would detect any.
    """
    with tempfile.TemporaryDirectory() as name, use_db(str(file), WorkDB.Mode.open) as database:
        pending = list(database.pending_work_items)
        begin = time.monotonic()
        with ProcessPoolExecutor(jobs, initializer=_enter, initargs=(Path(name),)) as pool:
            families = sorted({family_of(item.mutations[0]) for item in pending})
            failing = [family for family, passed in pool.map(_passes, families) if not passed]
            if failing:
                sys.exit(f"Without a mutant the tests already fail for {', '.join(failing)}.")
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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--session", type=Path, default=Path("mutants.sqlite"))
    parser.add_argument(
        "--least", type=float, default=95.0, metavar="PERCENT", help="fail below this share"
    )
    parser.add_argument("--test", metavar="FAMILY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.test:
        return run_tests(options.test)
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
    test_mutants(options.session, options.jobs)
    missed = report(options.session, explanations())
    with use_db(str(options.session), WorkDB.Mode.open) as database:
        tested = database.num_results
    return int(100 * (tested - missed) < options.least * tested)


if __name__ == "__main__":
    sys.exit(main())
