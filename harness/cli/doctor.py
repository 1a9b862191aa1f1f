"""doctor: what is installed, whether the pytest plugin is active, which GPUs there are, and whether
one case runs.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib import metadata

from rollproof.cli.named_targets import references
from rollproof.cli.output import JsonTarget, Output
from rollproof.core.error_text import describe_error
from rollproof.engines.gpus import find_gpus
from rollproof.judging.report import REPORT_SCHEMA, ExitCode
from rollproof.reporting.text import Line, Style
from rollproof.stacks import STACKS, installed_version

__all__ = ["doctor"]

_REQUIRED = (
    "numpy",
    "pyarrow",
    "scipy",
    "hypothesis",
    "pytest",
    "starlette",
    "uvicorn",
    "typer",
    "rich",
)
_OPTIONAL = (
    "jinja2",
    "matplotlib",
    "pytest-xdist",
    "torch",
    "ray",
    "vllm",
    "sglang",
    "megatron-core",
    "transformers",
    "nvidia-ml-py",
    *STACKS,
)


def doctor(json_target: JsonTarget = None) -> int:
    """Say what this installation can do. Exit code 1 where something that it needs does not work."""
    output = Output(json_target)
    required = {name: installed_version(name) for name in _REQUIRED}
    optional = {name: installed_version(name) for name in _OPTIONAL}
    plugin, trouble = _plugin()
    gpus = find_gpus()
    seconds, failure = _one_case()
    output.lines(_lines(required, optional, plugin, trouble))
    names = ", ".join(gpu.name or f"device {gpu.index}" for gpu in gpus.gpus)
    output.lines(
        [(Style.PLAIN, f"GPU            {gpus.reason or f'{names} (asked: {gpus.source})'}")]
    )
    output.lines(
        [
            (
                (Style.BAD, f"one case       {failure}")
                if failure
                else (Style.PLAIN, f"one case       runs, in {seconds * 1000:.1f} ms")
            )
        ]
    )
    good = None not in required.values() and plugin and failure is None
    output.json(
        {
            "schema": REPORT_SCHEMA,
            "rollproof": metadata.version("rollproof"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "required": required,
            "optional": optional,
            "pytest_plugin": plugin,
            "gpus": [
                {"index": gpu.index, "name": gpu.name, "memory": gpu.memory} for gpu in gpus.gpus
            ],
            "no_gpu_because": gpus.reason,
            "case_seconds": None if failure else seconds,
        }
    )
    return output.ended(ExitCode.PASS if good else ExitCode.FAIL)


def _lines(
    required: dict[str, str | None], optional: dict[str, str | None], plugin: bool, trouble: str
) -> Iterator[Line]:
    yield Style.TITLE, f"rollproof {metadata.version('rollproof')}"
    yield Style.PLAIN, f"Python         {platform.python_version()} ({sys.executable})"
    for name, version in required.items():
        yield (
            (Style.PLAIN, f"{name:<14} {version}")
            if version
            else (Style.BAD, f"{name:<14} missing: install rollproof anew")
        )
    for name, version in optional.items():
        yield (
            (Style.PLAIN if version else Style.FAINT),
            f"{name:<14} {version or 'not installed (optional)'}",
        )
    yield (
        (Style.PLAIN, "pytest plugin  active")
        if plugin
        else (Style.BAD, f"pytest plugin  not active: {trouble}")
    )


def _plugin() -> tuple[bool, str]:
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        return False, "PYTEST_DISABLE_PLUGIN_AUTOLOAD is set: run pytest with `-p rollproof.plugin`"
    if any(entry.value == "rollproof.plugin" for entry in metadata.entry_points(group="pytest11")):
        return True, ""
    return False, "rollproof is importable but not installed: run `pip install` on it"


def _one_case() -> tuple[float, str | None]:
    """Seconds that one small case of the first reference takes, once what it imports is imported;
    or why it does not run.
    """
    from rollproof.verification.rollouts import cases_for
    from rollproof.verification.runner import run_case

    target = references()[0]
    try:
        case = next(iter(cases_for(target.factory, profile="pr", seed=0)))
        run_case(target.factory, case)
        start = time.perf_counter()
        run_case(target.factory, case)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with this installation is what doctor is asked for
        return 0.0, f"does not run: {describe_error(error)}"
    return time.perf_counter() - start, None
