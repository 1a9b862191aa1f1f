"""The files that ``rollproof adopt`` writes into the repository of a stack."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

from rollproof.stacks.matrix import Entry, Matrix
from rollproof.stacks.releases import Release
from rollproof.stacks.repositories import Repository
from rollproof.verification.expected_failures import Expectation

__all__ = ["EXPECTED_FILE", "WORKFLOW_FILE", "expectations", "repository_files", "requirement"]

EXPECTED_FILE = "rollproof_expected.toml"
"""Name of the file of expected failures, in the folder of the test."""
WORKFLOW_FILE = ".github/workflows/rollproof.yml"
# Short enough for the formatters of all these repositories, one of which allows 88 columns.
_TEST = '''\
{licence}"""Do our rollouts keep what they promise the trainer, whatever the engines do meanwhile?

rollproof runs the code of this checkout on fake engines, through aborts, resumes and
weight updates on a virtual clock, and judges what comes out: one test per check.

{expected} lists what is known to fail, and why. A fault that is
repaired fails here until its entry is removed. To have the file rewritten:

    pytest {path} --rollproof-accept \\
        --rollproof-expected={expected_path}
"""

{imports}{script}

def judged(part, about="rollouts"):
    """Judge a part of {stack}, as this checkout has it."""
    # Not in every environment of this repository{old_python}.
    rollproof = pytest.importorskip("rollproof")
    stacks = pytest.importorskip("rollproof.stacks")
    here = Path(__file__).resolve()
    return rollproof.conformance(
        stacks.StackPart("{stack}", part, checkout=here.parents[{depth}]),
        name=f"{stack} {{part}}",
        about=about,
        expected=here.with_name("{expected}"),
    )


{alone}{tests}'''

_ALONE = '''\
@pytest.fixture(autouse=True, scope="module")
def alone(request):
    """Skip next to other tests, for which it would replace {stands_in}."""
    if any(item.path != request.path for item in request.session.items):
        pytest.skip(f"needs a process of its own: pytest {{request.path}}")


'''

_SCRIPT = """
if __name__ == "__main__":
    code = pytest.main([__file__])
    # Without rollproof, which is looked for below, nothing is collected.
    sys.exit(0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code)
"""

_WORKFLOW = """\
# Judges the rollout code of this repository with rollproof, on a runner without a GPU.
name: rollproof

on:
  pull_request:
  push:
    branches: [main]

permissions:
  contents: read

jobs:
  rollouts:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
        with:
          persist-credentials: false
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11" # of the pins below
      - name: Install # what the judged code imports: no engine, no CUDA extension
        run: |
{install}
      - name: Run # without the fixtures of other tests, which need more packages
        run: >-
          python -m pytest --noconftest {path}
          --rollproof-report=report/rollproof.json --junit-xml=report/junit.xml
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: rollproof
          include-hidden-files: true # .rollproof/ is one
          # counterexamples: `rollproof replay FILE --trust-subject` runs one again
          path: |
            report/
            .rollproof/
"""


def repository_files(repository: Repository, release: Release, checkout: Path) -> dict[str, str]:
    """Return the texts of the files by their path in the checkout: the test, the expected failures
    of the newest pinned release, and a workflow.
    """
    folder = PurePosixPath(repository.folder_in(checkout))
    test, expected = folder / repository.file, folder / EXPECTED_FILE
    return {
        str(test): _test_text(repository, test, _licence(checkout / folder)),
        str(expected): _expected_text(Matrix.read(repository.stack)),
        WORKFLOW_FILE: _WORKFLOW.format(
            path=test, install=textwrap.indent("\n".join(_commands(release)), " " * 10)
        ),
    }


def requirement(repository: Repository) -> str:
    """Return the requirement of rollproof as the repository's dependencies write it."""
    # A development version asks for the release that it becomes.
    version = metadata.version("rollproof").partition(".dev")[0]
    marker = "; python_version >= '3.11'" if repository.old_python else ""
    return f"rollproof[serve]>={version}{marker}"


def expectations(matrix: Matrix) -> list[tuple[Entry, Expectation]]:
    """Return what is expected of the newest pinned release, with the entry that says it."""
    version = matrix.pinned[-1]
    listed: list[tuple[Entry, Expectation]] = []
    for entry in matrix.entries:
        if version not in entry.versions:
            continue
        for table in ("fails", "may_fail", "unknown"):
            parts: Mapping[str, tuple[str, ...]] = getattr(entry, table)
            listed += [
                (
                    entry,
                    Expectation(
                        check=check,
                        reason=entry.reason,
                        shows=entry.shows.get(check, ()),
                        subject=f"{matrix.stack} {part}",
                        after=entry.after,
                        strict=table != "may_fail",
                        undecided=table == "unknown",
                    ),
                )
                for check, names in parts.items()
                for part in names
            ]
    return listed


def _expected_text(matrix: Matrix) -> str:
    version = matrix.pinned[-1]
    head = (
        f"# What rollproof finds in {matrix.stack} {version} as it was released, one entry per"
        " check and part.\n# An entry whose fault was repaired is an error: remove it."
        " docs/options.md of rollproof has the format."
    )
    blocks = [head]
    # An entry of the matrix becomes several here: its script is named at the first.
    previous: Entry | None = None
    for entry, expectation in expectations(matrix):
        script = f"# docs/track_record/{entry.script} of rollproof shows it by hand.\n"
        comment = script if entry.script and entry is not previous else ""
        blocks.append(comment + expectation.toml())
        previous = entry
    return "\n\n".join(blocks) + "\n"


def _test_text(repository: Repository, path: PurePosixPath, licence: str) -> str:
    modules = ["sys"] if repository.script else []
    imports = "".join(f"import {module}\n" for module in modules) + "from pathlib import Path\n"
    replaced = repository.stands_in
    return _TEST.format(
        licence=licence,
        expected=EXPECTED_FILE,
        path=path,
        expected_path=path.with_name(EXPECTED_FILE),
        imports=f"{imports}\nimport pytest\n",
        old_python=", and not for Python 3.10" if repository.old_python else "",
        alone=_ALONE.format(stands_in=replaced) if replaced else "",
        stack=repository.stack,
        depth=len(path.parents) - 1,
        tests="\n\n".join(_tests(repository)),
        script=_SCRIPT if repository.script else "",
    )


def _tests(repository: Repository) -> Iterator[str]:
    """Yield a function for each part."""
    # Not one parametrised function: a maintainer can delete or mark a part.
    kinds = {
        "rollouts": repository.parts,
        "batches": repository.batches,
        "corrections": repository.corrections,
    }
    for kind, parts in kinds.items():
        about = "" if kind == "rollouts" else f', about="{kind}"'
        for part in parts:
            name = part.replace("-", "_")
            yield f'@judged("{part}"{about})\ndef test_{name}(check): ...\n'


def _licence(folder: Path) -> str:
    """Return the comment with the licence at the head of another test of the folder, which CI
    demands of every file, or nothing.
    """
    # From the checkout and not from here: the year and the owner are the repository's.
    for file in sorted(folder.glob("test_*.py")):
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        end = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
        head = lines[:end]
        if any("copyright" in line.lower() for line in head):
            return "\n".join(head) + "\n"
    return ""


def _commands(release: Release) -> Iterator[str]:
    """Yield the commands that install rollproof and what the judged code imports."""
    name = release.stack
    version = metadata.version("rollproof").partition(".dev")[0]
    # `serve`: the parts that speak HTTP run against fake servers
    yield f'pip install "rollproof[serve]>={version}"'
    yield (
        "pip install -r \"$(python -c 'import rollproof.stacks as s;"
        f' print(s.requirements_file("{name}"))\')"'
    )
    if release.no_deps:
        yield f"pip install --no-deps {' '.join(release.no_deps)}"
    if release.repository is None:
        # the package asks for its own version
        yield "pip install --no-deps --ignore-requires-python -e ."
