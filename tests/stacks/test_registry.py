from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rollproof import stacks
from rollproof.cli.named_targets import target_of_recipe
from rollproof.errors import StackError, UsageError
from rollproof.stacks import (
    STACKS,
    Found,
    Release,
    Stack,
    load_stack,
    parse_spec,
    release_of,
    requirements_file,
)
from rollproof.stacks._support.upstream import imported, missing_dependency
from rollproof.stacks.releases import (
    changed_files,
    changed_in_place,
    checked_out,
    installed_version,
)
from rollproof.stacks.verl.release import RELEASE, VERSIONS


def test_a_spec_is_a_name_or_a_name_and_a_version() -> None:
    """``NAME`` and ``NAME==VERSION`` are read, with blanks around them."""
    assert ("verl", None) == parse_spec("verl")
    assert ("verl", "0.9.1") == parse_spec(" verl == 0.9.1 ")


@pytest.mark.parametrize(
    "spec", ["", "==0.9.1", "verl==", "verl>=0.9", "verl==0.9,<1", "verl 0.9.1"]
)
def test_any_other_spec_is_refused(spec: str) -> None:
    """Operators other than ``==``, and halves that are missing, are refused with the form that is
    understood.
    """
    with pytest.raises(
        UsageError, match=r"write NAME or NAME==VERSION, with NAME among \[.*'verl'.*\]"
    ):
        parse_spec(spec)


def test_an_unknown_stack_is_refused_with_the_names_of_all() -> None:
    """A name that is no stack's is answered with the nearest one, all of them, and the way to judge
    code of one's own.
    """
    with pytest.raises(
        UsageError,
        match=(
            r"No stack is named 'verll'. Did you mean 'verl'\? Stacks: \[.*'verl'.*\].*--subject"
            r" module:factory"
        ),
    ):
        load_stack("verll")


def test_an_unknown_version_is_the_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a version that the adapters do not know is requested while another is installed, the error
    has the command that installs it.
    """
    monkeypatch.setattr(stacks, "installed_version", lambda name: "0.9.1")
    with pytest.raises(
        StackError,
        match=(
            r"verl==0\.10\.0 was requested, but 0\.9\.1 is installed.*\n.* --ignore-requires-python"
            r" verl==0\.10\.0$"
        ),
    ):
        load_stack("verl==0.10.0")


def test_a_missing_stack_names_the_commands_that_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not installed: the error has the pinned requirements and the requested version."""
    monkeypatch.setattr(stacks, "installed_version", lambda name: None)
    with pytest.raises(
        StackError,
        match=(
            r"verl is not installed here.*\n.*pip install -r .*verl/requirements\.txt && .*"
            r"python verl==0\.8\.0$"
        ),
    ):
        load_stack("verl==0.8.0")


def test_another_version_than_requested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version in the spec is a demand, not a wish."""
    monkeypatch.setattr(stacks, "installed_version", lambda name: "0.9.0")
    with pytest.raises(
        StackError,
        match=r"verl==0\.9\.1 was requested, but 0\.9\.0 is installed.*\n.*verl==0\.9\.1$",
    ):
        load_stack("verl==0.9.1")


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.9.0", "0.9.0"),
        ("0.10.0", "0.9.1"),
        ("0.9.0.post1", "0.9.0"),
        ("0.8.5", "0.8.0"),
        ("0.7.1", "0.8.0"),
        ("0.9.0+local", "0.9.0"),
        ("1dda039b9", "0.9.1"),
        ("1dda039b9+changed", "0.9.1"),
        ("unversioned", "0.9.1"),
    ],
)
def test_a_version_is_driven_as_the_nearest_known_one(version: str, line: str) -> None:
    """The newest that is not newer, the oldest for one older than all, the newest for a commit."""
    assert line == RELEASE.line_of(version)


def test_a_missing_dependency_names_the_package() -> None:
    """Where an import inside of it fails, the error says which, and what to run (verl's own
    requirements lack orjson).
    """
    error = missing_dependency(
        RELEASE, "0.9.1", ModuleNotFoundError("No module named 'orjson'", name="orjson")
    )
    assert (
        "verl 0.9.1 is installed, but the package 'orjson' that it needs is missing. Run:\n"
        in str(error)
    )


def test_a_name_that_is_not_there_is_no_missing_package() -> None:
    """Packages of other versions mend it for a known release; for another one nothing does but a
    known one.
    """
    words = "cannot import name 'Strategy' from 'ray.util'"
    moved = ImportError(words, name="ray.util")
    message = str(missing_dependency(RELEASE, "0.9.1", moved))
    assert f"verl 0.9.1 is installed, but importing it fails: {words}. Run:\n" in message
    for error in (
        moved,
        ModuleNotFoundError("No module named 'verl.workers.rollout'", name="verl.workers.rollout"),
    ):
        message = str(missing_dependency(RELEASE, "0.10.0", error))
        assert (
            f"but importing it fails: {error}. The adapters know 0.8.0, 0.9.0, 0.9.1, and drive it"
            " as 0.9.1." in message
        )
        assert message.endswith("verl==0.9.1")


@pytest.mark.parametrize("name", list(STACKS))
def test_every_stack_pins_its_dependencies(name: str) -> None:
    """The shipped list exists, pins every line, and leaves the framework itself to the second
    command.
    """
    release = release_of(name)
    text = Path(requirements_file(name)).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    assert [] == [line for line in lines if "==" not in line]
    assert not [line for line in lines if line.startswith(f"{release.distribution}==")]
    assert name == release.stack


def test_a_version_that_the_table_does_not_know_is_judged_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reports and the recipe of a counterexample say as which one it is driven."""
    monkeypatch.setattr(stacks, "installed_version", lambda name: "0.10.0")
    loaded: list[Found] = []
    monkeypatch.setattr(
        "rollproof.stacks.verl.load",
        lambda found: loaded.append(found) or Stack(name="verl", version="0.10.0", parts={}),
    )
    stack = load_stack("verl==0.10.0")
    assert [Found(version="0.10.0", line="0.9.1")] == loaded
    assert "verl 0.10.0 (untested, driven as 0.9.1)" == stack.title
    expected = {"stack": "verl", "version": "0.10.0", "part": "client", "driven_as": "0.9.1"}
    assert expected == stack.recipe("client")


SOURCE = Release(
    stack="slime",
    distribution="slime",
    versions=("abc123",),
    repository="https://x/slime",
    module_file="slime/__init__.py",
)


def test_a_checkout_must_be_of_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is missing, or that holds something else, is refused; an archive without git's
    data has no version.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        StackError,
        match=r"there is no such folder\. .* a checkout of slime \(https://x/slime\)\.",
    ):
        checked_out(tmp_path / "nosuch", SOURCE)
    with pytest.raises(
        StackError, match=r"is not a checkout of slime: it has no slime/__init__\.py"
    ):
        checked_out(tmp_path, SOURCE)
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    assert "unversioned" == checked_out(tmp_path, SOURCE)
    assert "git clone https://x/slime slime && git -C slime checkout abc123" in SOURCE.install()


def _git(folder: Path, *arguments: str) -> str:
    """What git says, as somebody, whatever repository surrounds it."""
    who = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of a stack, with one commit and a file of a name that is not ASCII."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "here"
    (folder / "slime").mkdir(parents=True)
    for name in ("slime/__init__.py", "slime/more.py", "größe.py", "notes.md"):
        (folder / name).write_text("x = 1\n", encoding="utf-8")
    _git(folder, "init", "-q")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "x")
    return folder


def test_the_version_of_a_checkout_is_its_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the table writes it, or its first nine digits; a repository that git's own variables name,
    as within a hook, is not used.
    """
    commit = _git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(repository.parent / "nosuch"))
    assert commit[:9] == checked_out(repository, SOURCE)
    assert commit[:8] == checked_out(repository, replace(SOURCE, versions=(commit[:8],)))


def test_changed_files_of_a_checkout_are_named(repository: Path) -> None:
    """A Python file that differs counts, whatever the index says; a text that differs, a file that
    is gone and a new one do not.
    """
    commit = _git(repository, "rev-parse", "HEAD")
    (repository / "notes.md").write_text("other", encoding="utf-8")
    (repository / "slime" / "more.py").unlink()
    (repository / "slime" / "new.py").touch()
    _git(repository, "rm", "-q", "--cached", "-r", ".")
    assert () == changed_files(repository, SOURCE)
    (repository / "slime" / "__init__.py").write_text("x = 2\n", encoding="utf-8")
    assert ("slime/__init__.py",) == changed_files(repository, SOURCE)
    assert f"{commit[:9]}+changed" == checked_out(repository, SOURCE)
    (repository / "größe.py").write_text("x = 2\n", encoding="utf-8")
    assert 2 == len(changed_files(repository, SOURCE))


def test_changed_code_is_judged_with_a_note(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not what the adapters know: the title says so, and it is not the commit that a spec
    demands.
    """
    commit = _git(repository, "rev-parse", "HEAD")
    source = replace(SOURCE, versions=(commit[:9],), module_file="slime/__init__.py")
    monkeypatch.setattr("rollproof.stacks.slime.RELEASE", source)
    monkeypatch.setattr(
        "rollproof.stacks.slime.load",
        lambda found: Stack(name="slime", version=found.version, parts={}),
    )
    assert f"slime {commit[:9]}" == load_stack(f"slime=={commit}", checkout=repository).title
    (repository / "slime" / "__init__.py").write_text("x = 2\n", encoding="utf-8")
    with pytest.raises(
        StackError,
        match=r"was requested, but \w+\+changed is checked out \(slime/__init__\.py is not as",
    ):
        load_stack(f"slime=={commit[:7]}", checkout=repository)
    assert (
        f"slime {commit[:9]}+changed (untested, driven as {commit[:9]})"
        == load_stack("slime", checkout=repository).title
    )


def test_a_counterexample_of_a_checkout_runs_on_its_present_code(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever mends a fault there replays it: another commit, or changed code, is no reason to
    refuse.
    """
    commit = _git(repository, "rev-parse", "HEAD")
    monkeypatch.setattr(
        "rollproof.stacks.slime.RELEASE",
        replace(SOURCE, versions=(commit[:9],), module_file="slime/__init__.py"),
    )
    monkeypatch.setattr(
        "rollproof.stacks.slime.load",
        lambda found: Stack(name="slime", version=found.version, parts={"part": SimpleNamespace}),
    )
    recipe = load_stack("slime", checkout=repository).recipe("part")
    assert {
        "stack": "slime",
        "version": commit[:9],
        "part": "part",
        "checkout": str(repository),
    } == recipe
    assert f"slime {commit[:9]} part" == target_of_recipe(recipe).name
    (repository / "slime" / "__init__.py").write_text("x = 2\n", encoding="utf-8")
    assert (
        f"slime {commit[:9]}+changed (untested, driven as {commit[:9]}) part"
        == target_of_recipe(recipe).name
    )


def test_a_second_checkout_of_a_process_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was imported stays imported: a second checkout of a stack in one process is refused."""
    monkeypatch.setattr(
        "rollproof.stacks.slime.RELEASE", replace(SOURCE, module_file="slime/__init__.py")
    )
    monkeypatch.setattr(
        "rollproof.stacks.slime.load",
        lambda found: Stack(name="slime", version=found.version, parts={}),
    )
    monkeypatch.setitem(sys.modules, "slime.__init__", ModuleType("slime"))
    sys.modules["slime.__init__"].__file__ = str(repository / "slime" / "__init__.py")
    load_stack("slime", checkout=repository)
    other = shutil.copytree(repository, repository.parent / "other")
    with pytest.raises(
        StackError,
        match=(
            r"slime is already imported from .*here.*, not from .*other: judge each checkout in a"
            r" process"
        ),
    ):
        load_stack("slime", checkout=other)


@pytest.mark.parametrize(
    "raised", [SyntaxError("invalid syntax"), RuntimeError("no GPU here"), SystemExit(3)]
)
def test_an_error_during_the_import_of_a_framework_is_reported_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    """It is reported in one line, as a stack that cannot be judged."""

    def load(found: Found) -> Stack:
        raise raised

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    monkeypatch.setattr(
        "rollproof.stacks.slime.RELEASE", replace(SOURCE, module_file="slime/__init__.py")
    )
    monkeypatch.setattr("rollproof.stacks.slime.load", load)
    with pytest.raises(
        StackError,
        match=(
            rf"slime unversioned is checked out, but importing it fails: {type(raised).__name__}: "
        ),
    ):
        load_stack("slime", checkout=tmp_path)


def test_a_checkout_that_lacks_a_module_of_its_own_is_no_missing_package() -> None:
    """No installation would mend it."""
    error = ModuleNotFoundError("No module named 'slime.rollout'", name="slime.rollout")
    assert "but incomplete: its module slime.rollout is missing" in str(
        missing_dependency(SOURCE, "abc123", error)
    )
    other = ModuleNotFoundError("No module named 'ray'", name="ray")
    assert "but the package 'ray' that it needs is missing" in str(
        missing_dependency(SOURCE, "abc123", other)
    )


def test_a_checkout_may_have_several_roots_and_need_a_further_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its modules are found in all of them, in their order; the commands install what goes in
    without its dependencies.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "of.py").touch()
    source = replace(
        SOURCE, module_file="src/of.py", roots=("src", "lib/src"), no_deps=("verifiers==9.9",)
    )
    for _ in range(2):
        assert "unversioned" == checked_out(tmp_path, source)
    assert [str(tmp_path / "src"), str(tmp_path / "lib" / "src"), str(tmp_path)] == sys.path[:3]
    assert (
        "slime/requirements.txt && python -m pip install --no-deps verifiers==9.9 && git clone"
        in source.install()
    )


def _distribution(folder: Path, origin: str) -> None:
    """Write what pip leaves of verl 0.9.1, installed from ``origin`` (a JSON object)."""
    info = folder / "verl-0.9.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: verl\nVersion: 0.9.1\n", encoding="utf-8"
    )
    if origin:
        (info / "direct_url.json").write_text(origin, encoding="utf-8")


@pytest.mark.parametrize(
    ("origin", "version"),
    [
        ("", "0.9.1"),
        ('{"url": "file:///x/verl-0.9.1.whl", "archive_info": {}}', "0.9.1"),
        ('{"url": "https://x/verl", "vcs_info": {"commit_id": "1dda039b9abc"}}', "0.9.1+1dda039b9"),
        ('{"url": "file:///x/verl", "dir_info": {}}', "0.9.1+local"),
    ],
)
def test_what_may_be_a_fork_is_not_called_a_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str, version: str
) -> None:
    """Its own version is that of the release which it was forked from."""
    _distribution(tmp_path / "site", origin)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert version == installed_version("verl")


def test_a_package_that_was_changed_in_place_is_not_called_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python files of the package are compared with the hashes in RECORD: not data, not files
    without a hash, not what is gone. The error names the first, and the command replaces the
    package although its version is installed.
    """
    site = tmp_path / "site"
    _distribution(site, "")
    files = {name: site / "verl" / name for name in ("a.py", "b.py", "gone.py", "data.json")}
    (site / "verl").mkdir()
    lines = ["verl/unhashed.py,,", "other/a.py,sha256=AAAA,1"]
    for name, file in files.items():
        file.write_text("x = 1\n", encoding="utf-8")
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        lines.append(f"verl/{name},sha256={digest.rstrip('=')},6")
    record = site / "verl-0.9.1.dist-info" / "RECORD"
    record.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(
        "rollproof.stacks.verl.load",
        lambda found: Stack(name="verl", version=found.version, parts={"client": SimpleNamespace}),
    )
    assert "verl 0.9.1" == load_stack("verl==0.9.1").title

    files["gone.py"].unlink()
    files["data.json"].write_text("{}", encoding="utf-8")
    assert () == changed_in_place(RELEASE)
    files["b.py"].write_text("x = 2\n", encoding="utf-8")
    assert ("verl/b.py",) == changed_in_place(RELEASE)
    stack = load_stack("verl")
    assert "verl 0.9.1+changed (untested, driven as 0.9.1)" == stack.title
    assert "verl/b.py" == stack.recipe("client")["changed"]
    assert stack.title == target_of_recipe(stack.recipe("client")).name.removesuffix(" client")
    files["a.py"].write_text("x = 2\n", encoding="utf-8")
    with pytest.raises(
        StackError,
        match=(
            r"verl==0\.9\.1 was requested, but 0\.9\.1\+changed is installed \(verl/a\.py and 1"
            r" more are not as installed\)\. Run:\n(.*\n)*.*--force-reinstall .*verl==0\.9\.1"
        ),
    ):
        load_stack("verl==0.9.1")


@pytest.mark.parametrize("editable", [False, True])
def test_a_released_package_is_judged_from_a_checkout(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: bool
) -> None:
    """A contributor's fork: named by ``--checkout``, or installed by ``pip install -e``."""
    monkeypatch.setattr(
        "rollproof.stacks.verl.RELEASE", replace(RELEASE, module_file="slime/__init__.py")
    )
    monkeypatch.setattr(
        "rollproof.stacks.verl.load",
        lambda found: Stack(name="verl", version=found.version, parts={}),
    )
    url = f'{{"url": "{repository.as_uri()}", "dir_info": {{"editable": true}}}}'
    _distribution(tmp_path / "site", url if editable else "")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    stack = load_stack("verl", checkout=None if editable else repository)
    commit = _git(repository, "rev-parse", "HEAD")[:9]
    assert f"verl {commit} (untested, driven as 0.9.1)" == stack.title
    assert str(repository) == stack.recipe("client")["checkout"]
    assert str(repository) == sys.path[0]


def test_the_table_of_versions_is_the_release() -> None:
    """The commands offer the newest known version by default, and another on request."""
    assert tuple(VERSIONS) == RELEASE.versions
    assert RELEASE.install().endswith("verl==0.9.1")
    assert RELEASE.install("7.7").endswith("verl==7.7")


def test_parts_are_chosen_by_name() -> None:
    """All parts by default; a name that is no part's is refused with the valid ones."""
    stack = Stack(name="x", version="1", parts={"a": object, "b": object})
    assert ["a", "b"] == list(stack.subjects())
    assert ["b"] == list(stack.subjects(["b"]))
    assert {"stack": "x", "version": "1", "part": "a"} == stack.recipe("a")
    assert "x 1" == stack.title
    with pytest.raises(UsageError, match=r"x has no parts \['c'\]; choose among \['a', 'b'\]"):
        stack.subjects(["c"])


def test_attributes_that_moved_are_an_import_error() -> None:
    """A class that is no longer where the table says counts as a failed import, which names the
    module.
    """
    with pytest.raises(ImportError, match=r"rollproof\.core\.records has no Nothing"):
        imported("rollproof.core.records:Nothing")
    assert Release is imported("rollproof.stacks:Release")
    assert stacks is imported("rollproof.stacks")
