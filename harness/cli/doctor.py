"""The command ``doctor``: what is installed, and whether it works."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement

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
    "hypothesis",
    "msgspec",
    "orjson",
    "pybase64",
    "pytest",
    "typer",
    "rich",
)
# Distributions, not modules: importing torch or ray to read a version would take seconds.
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
    """Show what this installation has and can do. Exit code 1 if a part that it needs is broken."""
    output = Output(json_target)
    required = {name: installed_version(name) for name in _REQUIRED}
    optional = {name: installed_version(name) for name in _OPTIONAL}
    extras = _extras()
    plugin, problem = _plugin()
    gpus = find_gpus()
    seconds, failure = _run_case()
    output.lines(_lines(required, optional, extras))
    output.lines(
        [
            (Style.PLAIN, "pytest plugin  active")
            if plugin
            else (Style.BAD, f"pytest plugin  not active: {problem}")
        ]
    )
    names = ", ".join(gpu.name or f"device {gpu.index}" for gpu in gpus.gpus)
    output.lines(
        [(Style.PLAIN, f"GPU            {gpus.reason or f'{names} (according to {gpus.source})'}")]
    )
    output.lines(
        [
            (Style.BAD, f"one case       {failure}")
            if failure
            else (Style.PLAIN, f"one case       runs, in {seconds * 1000:.1f} ms")
        ]
    )
    # Optional packages and GPUs do not count: most users have neither.
    good = None not in required.values() and plugin and failure is None
    output.json(
        {
            "schema": REPORT_SCHEMA,
            "rollproof": metadata.version("rollproof"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "required": required,
            "optional": optional,
            "extras": extras,
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
    required: Mapping[str, str | None],
    optional: Mapping[str, str | None],
    extras: Mapping[str, Mapping[str, str | None]],
) -> Iterator[Line]:
    yield Style.TITLE, f"rollproof {metadata.version('rollproof')}"
    yield Style.PLAIN, f"Python         {platform.python_version()} ({sys.executable})"
    for name, version in required.items():
        yield (
            (Style.PLAIN, f"{name:<14} {version}")
            if version
            else (Style.BAD, f"{name:<14} missing: install rollproof again")
        )
    for name, version in optional.items():
        yield (
            Style.PLAIN if version else Style.FAINT,
            f"{name:<14} {version or 'not installed (optional)'}",
        )
    for extra, packages in extras.items():
        missing = [name for name, version in packages.items() if version is None]
        if missing:
            text = f"needs {', '.join(missing)}: pip install 'rollproof[{extra}]'"
            yield Style.FAINT, f"extra {extra:<8} {text}"
        else:
            yield Style.PLAIN, f"extra {extra:<8} available"


def _extras() -> dict[str, dict[str, str | None]]:
    """Return the installed versions of the packages of each extra; any version counts."""
    extras: dict[str, dict[str, str | None]] = {}
    distribution = metadata.distribution("rollproof")
    for extra in distribution.metadata.get_all("Provides-Extra") or ():
        for text in distribution.requires or ():
            requirement = Requirement(text)
            # The marker also has conditions on Python: megatron-core has a pin for each.
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                version = installed_version(requirement.name)
                extras.setdefault(extra, {})[requirement.name] = version
    return extras


def _plugin() -> tuple[bool, str]:
    # The two ways in which `pip install` succeeds and pytest still does not know the plugin.
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        return False, "PYTEST_DISABLE_PLUGIN_AUTOLOAD is set: run pytest with `-p rollproof.plugin`"
    if any(entry.value == "rollproof.plugin" for entry in metadata.entry_points(group="pytest11")):
        return True, ""
    return False, "rollproof is importable but not installed: run `pip install` on it"


def _run_case() -> tuple[float, str | None]:
    """Return the seconds that one small case of the first reference takes, or why it fails."""
    from rollproof.verification.rollouts import cases_for
    from rollproof.verification.runner import run_case

    target = references()[0]
    try:
        case = next(iter(cases_for(target.factory, profile="pr", seed=0)))
        run_case(target.factory, case)  # once before, to import everything
        start = time.perf_counter()
        run_case(target.factory, case)
    except Exception as error:  # noqa: BLE001 - whatever is wrong is what doctor reports
        return 0.0, f"does not run: {describe_error(error)}"
    return time.perf_counter() - start, None
