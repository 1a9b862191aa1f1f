"""The repositories that ``rollproof adopt`` knows: where their CI looks for tests, and which parts
of their stack are judged there.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rollproof.errors import UsageError
from rollproof.stacks.releases import STACKS

__all__ = ["REPOSITORIES", "Repository", "repository_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """What a test in the repository of a stack has to fit.

    Fields:
        stack: The stack's name in ``STACKS``.
        folders: Where CI collects tests of rollout code, newest layout first.
        file: Name of the test file there.
        collected: What of its CI collects that file.
        dependency: Where its dependencies of tests are listed.
        locked: What has to be made again when they change; empty if nothing is locked.
        parts, batches, corrections: The parts of the stack, by kind.
        old_python: Its CI also runs a Python below 3.11, which rollproof does not support.
        stands_in: What the adapters replace for the whole process, if anything. Other tests may
            need it, so the file runs in a process of its own only.
        script: CI runs test files as scripts.
    """

    stack: str
    folders: tuple[str, ...]
    file: str = "test_rollproof.py"
    collected: str
    dependency: str
    locked: str = ""
    parts: tuple[str, ...]
    batches: tuple[str, ...] = ()
    corrections: tuple[str, ...] = ()
    old_python: bool = False
    stands_in: str = ""
    script: bool = False

    def folder_in(self, checkout: Path) -> str:
        """Return the folder for the test: the first that the checkout has."""
        present = (folder for folder in self.folders if (checkout / folder).is_dir())
        return next(present, self.folders[0])


_ALL = (
    Repository(
        stack="verl",
        folders=("tests/workers/rollout",),
        # CI runs files of other names on runners with GPUs.
        file="test_rollproof_on_cpu.py",
        collected="cpu_unit_tests.yml collects every *_on_cpu.py",
        dependency="the extras test and cpu of pyproject.toml",
        locked="uv.lock and the image of cpu_unit_tests.yml",
        parts=("client", "single-turn-agent-loop", "tool-agent-loop", "checkpoint-manager"),
        batches=("sample-dicts", "padded-batch", "unpadded-batch"),
        corrections=(
            "token-tis",
            "normalised-token-tis",
            "sequence-tis",
            "icepop",
            "rejection",
            "bypass-reinforce",
        ),
        old_python=True,
    ),
    Repository(
        stack="skyrl",
        folders=("tests/backends/skyrl_train/inference_servers",),
        collected="cpu_skyrl_train.yaml collects tests/backends/skyrl_train",
        dependency="the extra dev of pyproject.toml",
        locked="uv.lock",
        parts=("client", "generator"),
        batches=("batch-tensors", "training-input"),
    ),
    Repository(
        stack="slime",
        # The folder of tests that need neither a GPU nor an engine.
        folders=("tests/plugin_contracts",),
        collected="the label run-ci-changed runs it; the CPU matrix of pr-test.yml.j2 is Python"
        " 3.10, so do not list it there",
        dependency="the dependencies of a job with Python 3.11 or newer",
        parts=("partial-rollout",),
        batches=("rank-data",),
        corrections=("tis", "icepop"),
        old_python=True,
        stands_in="sglang, sglang_router, megatron and wandb",
        script=True,
    ),
    Repository(
        stack="nemo-rl",
        folders=("tests/unit/experience",),
        collected="L0_Unit_Tests_Other.sh collects tests/unit/experience, on runners with GPUs",
        dependency="the dependency group test of pyproject.toml",
        locked="uv.lock",
        parts=("single-controller", "async-grpo", "sglang-rollouts"),
        batches=("data-plane", "async-grpo-batch"),
        stands_in="loggers and trainers",
    ),
    Repository(
        stack="prime-rl",
        folders=("tests/unit/orchestrator",),
        collected="cpu_tests.yaml collects tests/unit",
        dependency="the dependency group dev of pyproject.toml",
        locked="uv.lock, which excludes releases that are younger than 7 days",
        parts=("orchestrator",),
        batches=("micro-batches",),
        stands_in="vllm and prime_rl.transports.weights",
    ),
    Repository(
        stack="trl",
        # Its configuration keeps this folder out of all other runs of pytest.
        folders=("tests/experimental",),
        file="test_async_grpo_rollproof.py",
        collected="`make test_experimental` in tests-experimental.yml collects tests/experimental",
        dependency="the extras test and dev of pyproject.toml",
        parts=("rollout-loop", "tool-loop"),
        batches=("fixed-count-rows", "token-budget-rows"),
        old_python=True,
    ),
    Repository(
        stack="areal",
        # The tests moved with the package after 1.0.4.
        folders=("tests/v2/inference_service", "tests/experimental/inference_service"),
        collected="test-areal.yml collects the folder when a pull request is labelled",
        dependency="the dependency group dev of pyproject.toml and pyproject.vllm.toml",
        locked="their uv locks and the image of test-areal.yml",
        parts=("remote-engine", "inference-bridge"),
        corrections=(
            "token-clamp",
            "token-mask",
            "token-k2",
            "token-k3",
            "sequence-clamp",
            "sequence-mask",
            "sequence-k3",
        ),
    ),
    Repository(
        stack="miles",
        folders=("tests/fast/ray/rollout",),
        collected="run_suite.py --hw cpu collects tests/fast",
        dependency="tests/ci/requirements-ci-cpu.txt",
        parts=("partial-rollout", "single-turn"),
        batches=("rank-data",),
        corrections=("tis", "icepop"),
        stands_in="sglang, sglang_router, megatron and wandb",
    ),
)
REPOSITORIES: Mapping[str, Repository] = MappingProxyType(
    {repository.stack: repository for repository in _ALL}
)
"""The repositories by the name of their stack."""


def repository_named(name: str) -> Repository:
    """Return the repository of a stack.

    Raises ``UsageError`` for a stack whose repository is not known.
    """
    if name in REPOSITORIES:
        return REPOSITORIES[name]
    # names have hyphens, packages underscores: both are typed
    near = difflib.get_close_matches(name.lower().replace("_", "-"), REPOSITORIES, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    if name in STACKS:
        guess = f" `rollproof verify --stack {name} --checkout DIR` judges a checkout of it."
    raise UsageError(
        f"rollproof adopt knows no repository of {name!r}: choose among {list(REPOSITORIES)}."
        f"{guess} `rollproof init` writes a test for code of your own."
    )
