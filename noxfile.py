# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.5"]
# ///
"""Sessions of rollproof: `nox -s verify`, `nox -s cpu`, ... (`nox --list` says what each does).

It also runs as a program: `uv run noxfile.py -s cpu`, or `python noxfile.py -s cpu` with nox
installed.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["cpu", "lint", "types", "docs"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
RESULTS = ROOT / "docs" / "stack_results"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
GROUPS = PROJECT["dependency-groups"]


def install(session: nox.Session, *groups: str) -> None:
    """Install the project itself with all that its own tests import, and dependency groups."""
    # setuptools builds in build/ and packs what is there, so a module that was deleted since the
    # last build would be installed too.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    session.install(".[serve,gap]")
    for group in groups:
        session.install(*nox.project.dependency_groups({"dependency-groups": GROUPS}, group))


@nox.session
def verify(session: nox.Session) -> None:
    """Judge the references and the known bugs, or a release: `-- --stack NAME==VERSION`."""
    install(session)
    stack = _value(session.posargs, "--stack")
    if stack is None:
        if not session.posargs:
            session.run("rollproof", "known-bugs")
        session.run("rollproof", "verify", *session.posargs)
        return
    name, _, version = stack.partition("==")
    distribution = _install_needs(session, name, session.posargs)
    if distribution is not None:
        session.install(
            "--no-deps",
            "--ignore-requires-python",
            f"{distribution}=={version}" if version else distribution,
        )
    session.run("rollproof", "verify", *session.posargs)


def _install_needs(session: nox.Session, name: str, arguments: list[str]) -> str | None:
    """Install what a stack needs; returns its name on the index, ``None`` for a checkout."""
    requirements = _of_stack(session, name, "requirements.txt")
    distribution, checked_out, *companions = _release(session, name)
    checkout = _value(arguments, "--checkout")
    if checked_out == "True" and not (checkout and Path(checkout).is_dir()):
        # Installing by name is no way out: an index may have something else of that name.
        session.error(
            f"{name} is on no package index: add --checkout DIR, the folder of a checkout"
            f" ({f'{checkout} is no folder' if checkout else 'none was given'})."
        )
    session.install("-r", str(requirements))
    if companions:
        session.install("--no-deps", *companions)
    return distribution if checked_out == "False" else None


def _of_stack(session: nox.Session, name: str, file: str) -> Path:
    """Return a file in the folder of a stack; ends the session if there is no such stack."""
    stacks = ROOT / "harness" / "stacks"
    path = stacks / name.replace("-", "_") / file
    if not path.is_file():
        names = sorted(match.parent.name.replace("_", "-") for match in stacks.glob(f"*/{file}"))
        session.error(f"No stack is named {name!r}. Stacks: {', '.join(names)}.")
    return path


def _release(session: nox.Session, name: str) -> list[str]:
    """Return the name of a stack on the index, whether a checkout is judged, and its companions.

    Companions are packages that are installed with it, without their dependencies.
    """
    program = (
        f"from rollproof.stacks import release_of; r = release_of({name!r}); print(r.distribution,"
        " bool(r.repository), *r.no_deps)"
    )
    return str(session.run("python", "-c", program, silent=True)).split()


@nox.session(reuse_venv=False)
def upstream(session: nox.Session) -> None:
    """Compare released stacks with their pinned verdicts: `-- NAME[==VERSION] [--checkout DIR]`.

    Without a version it judges every pinned release in turn. An unexpected failure or pass is an
    error. `--write` stores the results in docs/stack_results, from which docs/stacks.md is made.
    `--track-record` repeats the runs that docs/track-record.md names of each release, and runs the
    scripts of docs/findings, too.
    """
    # The environment starts empty: packages that another stack needs would hide what this one
    # lacks.
    arguments = list(session.posargs)
    write, record = (_removed(arguments, option) for option in ("--write", "--track-record"))
    if not arguments or arguments[0].startswith("-"):
        session.error("Name a stack: nox -s upstream -- NAME[==VERSION].")
    name, _, version = arguments.pop(0).partition("==")
    matrix = _of_stack(session, name, "verdicts.toml")
    pinned = tomllib.loads(matrix.read_text(encoding="utf-8"))["pinned"]
    if version and not _pinned(version, pinned):
        session.error(
            f"{name}=={version} has no pinned verdicts; these releases have: {', '.join(pinned)}."
            " `nox -s verify` judges any release."
        )
    install(session, *(["test"] if record else []))
    distribution = _install_needs(session, name, arguments)
    # A checkout is judged instead of the releases: one is installed for its metadata alone.
    one = version or distribution is None or _value(arguments, "--checkout")
    for release in [version] if one else pinned:
        if distribution is not None:
            requirement = f"{distribution}=={release}" if release else distribution
            session.install("--no-deps", "--ignore-requires-python", requirement)
        spec = f"{name}=={release}" if release else name
        report = Path(session.create_tmp()) / f"{name}.json"
        command = ["rollproof", "verify", "--stack", spec, "--matrix", "--json", str(report)]
        session.run(*command, *arguments, success_codes=[0, 1] if write else [0])
        if write:
            session.run("rollproof", "matrix", "add", str(report), "--to", str(RESULTS))
        if record:
            _repeat_recorded_runs(session, name, release, _value(arguments, "--checkout"))


@nox.session(reuse_venv=False)
def regressions(session: nox.Session) -> None:
    """Put published faults back into a stack and judge it: `-- NAME [--checkout DIR]`.

    A fault that is not found as docs/regressions/NAME.toml says is an error. `--write` stores the
    results in docs/regression_results, from which docs/regressions.md is made, and `--only
    REFERENCE` runs one fault.
    """
    if not session.posargs or session.posargs[0].startswith("-"):
        session.error("Name a stack: nox -s regressions -- NAME.")
    name = session.posargs[0]
    faults = ROOT / "docs" / "regressions" / f"{name}.toml"
    if not faults.is_file():
        names = sorted(path.stem for path in faults.parent.glob("*.toml"))
        session.error(f"No faults are listed for {name}; there are files for: {', '.join(names)}.")
    install(session)
    distribution = _install_needs(session, name, session.posargs)
    if distribution is not None:
        version = tomllib.loads(faults.read_text(encoding="utf-8"))["version"]
        requirement = f"{distribution}=={version}"
        session.install("--no-deps", "--ignore-requires-python", requirement)
    session.run("python", "-m", "tools.regressions", *session.posargs)


def _repeat_recorded_runs(
    session: nox.Session, name: str, release: str, checkout: str | None
) -> None:
    """Run the tests of "found by" in docs/track-record.md, and of docs/findings, for a release."""
    variable = f"ROLLPROOF_{name.upper().replace('-', '_')}"
    session.run(
        *("pytest", "-o", "faulthandler_timeout=0"),
        *("tests/stacks/test_found_by.py", "tests/stacks/test_findings.py"),
        # the ids begin with stack and release
        *("-k", f"(a_run_of_the_release or of_a_page) and {name}-{release}"),
        env={variable: str(Path(checkout).resolve())} if checkout else {},
        # 5: nothing is known to be found in this release
        success_codes=[0, 5],
    )


@nox.session
def cpu(session: nox.Session) -> None:
    """Run all tests that need no GPU, against the installed wheel."""
    install(session, "test")
    session.run("pytest", *(session.posargs or ["-n", "2", "--dist", "loadfile", "tests"]))


@nox.session(python=nox.project.python_versions(PROJECT))
def pythons(session: nox.Session) -> None:
    """Run the tests of `cpu` on each Python that the classifiers name: for a nightly job."""
    cpu(session)


@nox.session(python=nox.project.python_versions(PROJECT)[0])
def lowest(session: nox.Session) -> None:
    """Run the tests of `cpu` with the lowest dependencies that pyproject.toml allows: nightly."""
    session.install("uv")
    versions = str(Path(session.create_tmp()) / "lowest.txt")
    session.run(
        *("uv", "pip", "compile", "--quiet", "--resolution", "lowest-direct"),
        *("--python", str(Path(session.bin) / "python")),
        *("--extra", "serve", "--extra", "gap", "--group", "pyproject.toml:test"),
        *("pyproject.toml", "--output-file", versions),
    )
    session.install("-r", versions)
    session.install("--no-deps", ".")
    # The lowest typer and matplotlib use what the newest click and pyparsing, which they do not
    # bound, call deprecated.
    quiet = (
        "-W",
        "ignore:'click:DeprecationWarning",
        "-W",
        "ignore:'enablePackrat':DeprecationWarning",
    )
    tests = session.posargs or ["-n", "2", "--dist", "loadfile", "tests"]
    session.run("pytest", *quiet, *tests)


LOCKS = {file.stem: file for file in sorted((ROOT / "tools" / "locks").glob("*.txt"))}
"""What repositories of frameworks lock, by name: constraints of pip."""


def _locked_python(file: Path) -> str:
    """Return the Python that a repository tests with: the second line of its file says it."""
    return file.read_text(encoding="utf-8").splitlines()[1].removeprefix("# python: ")


@nox.session
@nox.parametrize(
    "python,lock", [(_locked_python(file), name) for name, file in LOCKS.items()], ids=list(LOCKS)
)
def locks(session: nox.Session, lock: str) -> None:
    """Run an example with the versions that a framework's repository locks: nightly.

    `nox -s "locks(skyrl)"` runs one. tools/locks has a file for each, with date and source. pip
    resolves the wheel against it, which fails if a bound of pyproject.toml excludes a version.
    """
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    session.install("--constraint", str(LOCKS[lock]), ".[serve,gap]")
    with tempfile.TemporaryDirectory() as name:
        # in a folder of its own, as in a repository that knows nothing of this one
        for file in ("my_tagged_client.py", "test_my_tagged_stack.py"):
            shutil.copy(ROOT / "docs" / "example" / file, name)
        session.chdir(name)
        session.run("pytest", "-q", "-p", "no:cacheprovider")
        session.run("rollproof", "doctor")


@nox.session
def ray(session: nox.Session) -> None:
    """Run the tests that need Ray: its wheel alone is as large as all other packages of `cpu`."""
    install(session, "test")
    session.install(*PROJECT["project"]["optional-dependencies"]["ray"])
    session.run("pytest", *(session.posargs or ["tests/cli/test_ray.py"]))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Damage what readers, commands and endpoints take, a minute each, and list what broke.

    `-- --inputs N --seed S --only NAME ...`: N inputs each instead, of these targets.
    """
    install(session)
    session.run("python", "-m", "tools.fuzz", *session.posargs)


@nox.session
def mutation(session: nox.Session) -> None:
    """Change the checks in one place at a time, and list the changes that no test notices.

    `-- --sample 200 --seed 1` (the default is 200 of seed 0: for a nightly job), or `-- --all`.
    """
    install(session, "mutation")
    session.run("pytest", "-q", "tests/tools/test_mutation.py")
    session.run("python", "-m", "tools.mutation", *session.posargs)


@nox.session
def trainers(session: nox.Session) -> None:
    """Run the tests that drive real trainers on the CPU.

    `-- --table FILE [SETUP ...]` judges Megatron setups and writes the verdicts. On Python 3.11 the
    replay code of verl, SkyRL and NeMo Automodel is judged too. `nox -s trainers --force-python
    3.12` is the nightly one: the newest megatron-core that the stand-in knows.
    """
    newer = _newer_python(session)
    # The index decides which build of torch comes: a CUDA build works too, and is twenty times as
    # large as the CPU build.
    session.install("torch==2.13.0", "transformers==5.24.0")
    # megatron-core's metadata asks for torch, numpy and packaging only, and pins none: without its
    # dependencies the torch above stays. 0.16.1 is the newest for Python 3.11; 0.19 needs 3.12 and
    # imports triton.
    session.install("packaging", *(["triton"] if newer else []))
    session.install("--no-deps", f"megatron-core=={'0.19.2' if newer else '0.16.1'}")
    if not newer:
        session.install("-r", str(ROOT / "harness" / "stacks" / "verl" / "requirements.txt"))
        session.install("--no-deps", "verl==0.9.1", "skyrl==0.3.0", "nemo-automodel==0.7.0")
    install(session, "test")
    if session.posargs[:1] == ["--table"]:
        session.run(
            "python", "-W", "ignore", "-m", "tools.judge_table", "megatron", *session.posargs[1:]
        )
        return
    # Without pytest-xdist: each test starts a process per rank, which would not fit beside others.
    tests = [
        "tests/replay",
        "tests/stacks/test_replay_layouts.py",
        "tests/stacks/test_documented_commands.py",
    ]
    # No timeout for a test: some run whole families of checks.
    session.run("pytest", "-o", "faulthandler_timeout=0", *(session.posargs or tests))


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the GPU suites; on a host without a GPU they are skipped with the reason.

    `-- --rollproof-require-gpu` makes that a failure. With `--no-venv` nothing is installed and no
    network is needed: the host's own Python must have rollproof and what is to be judged.
    """
    if session.virtualenv.is_sandboxed:
        install(session, "test")
        session.install("nvidia-ml-py")
    session.run("python", "-m", "pytest", "gpu_suites", *session.posargs, external=True)


ENGINES = {
    # These packages are built for CUDA; with a torch for CPUs, transformers fails to import if they
    # are there.
    "vllm": {"without_dependencies": (), "removed": ("torchvision", "torchaudio", "torchcodec")},
    "sglang": {"without_dependencies": ("sglang==0.5.21",), "removed": ()},
}
"""Engines that run on a plain CPU: what is installed without its dependencies after their
requirements, and what is removed again.
"""


@nox.session
@nox.parametrize("engine", list(ENGINES), ids=list(ENGINES))
def engines(session: nox.Session, engine: str) -> None:
    """Judge real engines on this CPU: `nox -s "engines(vllm)"`. Installs gigabytes, once."""
    marker = Path(session.virtualenv.location) / "installed"
    requirements = ROOT / "harness" / "engines" / engine / "requirements.txt"
    if not marker.is_file() or marker.read_text(encoding="utf-8") != requirements.read_text(
        encoding="utf-8"
    ):
        session.install("-r", str(requirements))
        for package in ENGINES[engine]["without_dependencies"]:
            session.install("--no-deps", package)
        for package in ENGINES[engine]["removed"]:
            # run_install, so that `nox --install-only` removes it too
            session.run_install("python", "-m", "pip", "uninstall", "-y", package)
        shutil.copy(requirements, marker)
    install(session, "test")
    tests = [
        *map(str, sorted(ROOT.glob(f"tests/engines/test_{engine}*.py"))),
        "tests/fakes/test_tiny_models.py",
    ]
    # No timeout for a test: an engine may take minutes to start.
    session.run("pytest", "-o", "faulthandler_timeout=0", *(session.posargs or ["-v", *tests]))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, layers and circles of imports, and the workflows."""
    # The layers are those of the installed package: in a checkout its folders lie apart.
    install(session)
    session.install(*GROUPS["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "pyproject.toml", "--no-cache")
    session.run("python", "-m", "tools.import_circles")
    # Offline: the online checks ask GitHub about the actions, which a lint run must not depend on.
    workflows = map(str, sorted((ROOT / "docs" / "ci").glob("*.yml")))
    session.run("zizmor", "-q", "--offline", "--config=.github/zizmor.yml", ".github", *workflows)


@nox.session
def types(session: nox.Session) -> None:
    """Type-check the installed wheel with mypy (strict) and pyright, from outside the checkout."""
    install(session, "types")
    python = str(Path(session.bin) / "python")
    with tempfile.TemporaryDirectory() as name:
        # A folder without a dot in its path: pyright ignores everything below .nox.
        folder = Path(name)
        session.install("--no-deps", "--target", str(folder / "site"), ".")
        shutil.copy(ROOT / "tests" / "typing" / "uses.py", folder)
        settings = {
            "include": ["site/rollproof", "uses.py"],
            "extraPaths": ["site"],
            "pythonVersion": "3.11",
            "reportMissingImports": "warning",  # frameworks that only their adapters import
            "reportMissingModuleSource": "none",
        }
        (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
        session.chdir(folder)
        for target in (["-p", "rollproof"], ["uses.py"]):
            command = ["mypy", "--config-file", str(ROOT / "pyproject.toml"), *target]
            session.run(*command, env={"MYPYPATH": "site"})
        session.run("pyright", "--pythonpath", python)
        session.run(
            "pyright", "--pythonpath", python, "--ignoreexternal", "--verifytypes", "rollproof"
        )


@nox.session
def docs(session: nox.Session) -> None:
    """Check that the generated pages of docs/ match the code, and build the site in site/.

    `-- --write` writes the pages.
    """
    install(session, "docs")
    session.run("python", "-m", "tools.docs.generate", *(session.posargs or ["--check"]))
    # NO_MKDOCS_2_WARNING: an advertisement of mkdocs-material
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks and print their figures; they never fail a build."""
    install(session)
    # http_soak.py takes an hour.
    programs = set((ROOT / "benchmarks").glob("*.py")) - {ROOT / "benchmarks" / "http_soak.py"}
    for program in sorted(programs):
        session.run("python", str(program), *session.posargs)


def _newer_python(session: nox.Session) -> bool:
    """Whether the session's Python is 3.12 or newer."""
    code = "import sys; print(sys.version_info >= (3, 12))"
    # run_install, because `nox --install-only` needs the answer too
    return "True" in str(session.run_install("python", "-c", code, silent=True))


def _pinned(version: str, pinned: list[str]) -> bool:
    """Whether a version is among the pinned ones; a commit may be abbreviated on either side."""
    return version in pinned or (
        len(version) >= 7
        and any(pin.startswith(version) or version.startswith(pin) for pin in pinned)
    )


def _removed(arguments: list[str], option: str) -> bool:
    """Remove ``option`` from the arguments; returns whether it was there."""
    found = option in arguments
    if found:
        arguments.remove(option)
    return found


def _value(arguments: list[str], option: str) -> str | None:
    """Return the value of ``option`` among the arguments."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        if argument.startswith(f"{option}="):
            return argument.removeprefix(f"{option}=")
        if argument == option:
            return following
    return None


if __name__ == "__main__":
    nox.main()
