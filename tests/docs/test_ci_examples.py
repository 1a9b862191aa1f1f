"""The workflows are YAML that GitHub takes, with options that rollproof has."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollproof.plugin import OPTIONS
from rollproof.stacks import STACKS, release_of

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
CI = ROOT / "docs" / "ci"
OURS = ROOT / ".github" / "workflows"
WORKFLOWS = sorted([*CI.glob("*.yml"), *OURS.glob("*.yml")])
STEP = {"name", "uses", "with", "run", "env", "if"}
JOB = {"runs-on", "timeout-minutes", "strategy", "steps", "needs", "if", "permissions"}


def read(path: Path) -> Any:
    class NoDuplicates(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types here
        """A loader that refuses a key given twice."""

    def mapping(loader: Any, node: Any) -> Any:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is given twice: {keys}"
        return {
            loader.construct_object(key): loader.construct_object(value, deep=True)
            for key, value in node.value
        }

    NoDuplicates.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return yaml.load(path.read_text(encoding="utf-8"), NoDuplicates)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_workflow_is_one(path: Path) -> None:
    """Known keys, bounded jobs, pinned actions, few permissions; each shell step is valid shell."""
    data = read(path)
    assert {"name", True, "permissions", "jobs"} <= set(
        data
    )  # YAML 1.1 reads the key `on` as true, and GitHub does not
    assert {"contents": "read"} == data["permissions"]
    for job in data["jobs"].values():
        assert set(job) <= JOB
        # a job may write only if nobody else's change starts it
        assert "permissions" not in job or {"schedule", "workflow_dispatch"} == set(data[True])
        assert 1 <= job["timeout-minutes"] <= 60
        assert all(name in data["jobs"] for name in [job.get("needs")] if name)
        for step in job["steps"]:
            assert set(step) <= STEP
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))
            assert "${{" not in step.get("run", ""), (
                "an expression in a script is a way in: pass it through env"
            )
            subprocess.run(["bash", "-n", "-c", step.get("run", "")], check=True)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_a_workflow_names_exists(path: Path) -> None:
    """Options, suites, sessions, modules and files."""
    text = path.read_text(encoding="utf-8")
    flags = {option.flag for option in OPTIONS}
    assert set(re.findall(r"--rollproof-[\w-]+", text)) <= flags
    assert all(
        (ROOT / "gpu_suites" / name).is_file() for name in re.findall(r"\btest_\w+\.py", text)
    )
    sessions = re.findall(
        r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"nox -s (\w+)", text)) <= set(sessions)
    modules = re.findall(r"rollproof\.gpu_suites\.([\w.]+)", text)
    assert all((ROOT / "gpu_suites" / f"{name.replace('.', '/')}.py").is_file() for name in modules)


@pytest.mark.parametrize(("workflow", "job"), [("cpu", "tests"), ("nightly", "pythons")])
def test_workflows_run_each_python_of_the_classifiers(workflow: str, job: str) -> None:
    """A Python that the package claims to support is tested with each change and every night."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    versions = [
        name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(prefix)
    ]
    assert versions == read(OURS / f"{workflow}.yml")["jobs"][job]["strategy"]["matrix"]["python"]


def test_the_nightly_workflow_judges_every_stack() -> None:
    """Released ones by name, those that are on no package index at the commit of their adapter."""
    jobs = read(OURS / "nightly.yml")["jobs"]
    releases = [release_of(name) for name in STACKS]
    assert {release.stack for release in releases if release.repository is None} == set(
        jobs["stacks"]["strategy"]["matrix"]["stack"]
    )
    expected = {
        (release.stack, release.repository, release.versions[-1])
        for release in releases
        if release.repository is not None
    }
    assert expected == {
        (entry["stack"], entry["repository"], entry["commit"])
        for entry in jobs["checkouts"]["strategy"]["matrix"]["include"]
    }
    for name in ("stacks", "checkouts"):
        (step,) = (step for step in jobs[name]["steps"] if "nox" in step.get("run", ""))
        assert "--track-record" in step["run"]


def test_the_gpu_workflow_runs_every_suite_and_requires_gpus() -> None:
    """No green run is empty, and none of the suites is forgotten."""
    job = read(OURS / "gpu.yml")["jobs"]["suite"]
    suites = {path.name for path in (ROOT / "gpu_suites").glob("test_*.py")} - {"test_gate.py"}
    assert suites == set(job["strategy"]["matrix"]["suite"])
    assert any("--rollproof-require-gpu" in step.get("run", "") for step in job["steps"])
