"""Judge real trainers and engines, and write the verdicts into the files of the docs.

``python -m tools.judge_table KIND FILE [NAME ...]``. Rows that are named are judged again, the
others stay; without names all rows of the kind are judged.

=============  =====================================================================
kind           rows
=============  =====================================================================
``hf``         setups of ``rollproof.replay.hf.hf_setups``
``megatron``   setups of ``rollproof.replay.megatron.megatron_setups``: those of
               megatron-core, and of other replay code that is installed
``veomni``     verl's replay controller for VeOmni
``vllm``,      targets of the engine, as such, in bfloat16, and with other tiny
``sglang``     models: ``vllm``, ``vllm bfloat16``, ``vllm-offline olmoe``
=============  =====================================================================

Rows of trainers go into ``docs/replay_results/*.json``, rows of engines into
``docs/engine_results/ENGINE.json``. The files are sorted and without times: only a verdict or a
version changes them.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollproof.core.error_text import one_line
from rollproof.core.progress import Progress
from rollproof.engines.engine_targets import REAL, engine_target
from rollproof.errors import EngineStartError, RollproofError, UsageError
from rollproof.judging.report import Report
from rollproof.verification.engines import judged, run_experiments
from rollproof.verification.replay import judge_replay
from tools.engine_results import row_of, save_results

__all__ = ["engine_rows", "judge_engine_row", "main", "trainer_row", "write_trainer_rows"]

_DTYPE = "bfloat16"
"""The dtype in which engines are judged in addition to float32."""


def main(arguments: list[str]) -> int:
    """Judge and write; return the exit code."""
    if len(arguments) < 2:
        sys.stderr.write(__doc__ or "")
        return 254
    kind, file, *names = arguments
    try:
        if kind in _TRAINERS:
            _TRAINERS[kind](Path(file), names)
        else:
            _judge_engine(kind, Path(file), names)
    except RollproofError as error:
        sys.stderr.write(f"{error}\n")
        return 254
    return 0


def trainer_row(
    report: Report, *, packages: Iterable[str], code: str, parallel: str, model: str, mode: str
) -> dict[str, Any]:
    """Return the row of a trainer: verdicts, the first finding of each check, package versions.

    ``code`` says which replay code was judged, ``parallel`` and ``model`` describe what ran.
    """
    findings = {result.id: result.findings[0] for result in report.results if result.findings}
    return {
        "code": code,
        "versions": {
            package: importlib.metadata.version(package).partition("+")[0] for package in packages
        },
        "parallel": parallel,
        "model": model,
        "mode": mode,
        "verdicts": {result.id: result.verdict for result in report.results},
        "findings": {
            check: f"{finding.title}: {finding.observed}" for check, finding in findings.items()
        },
    }


def write_trainer_rows(
    file: Path, names: Iterable[str], row: Callable[[str], dict[str, Any]]
) -> None:
    """Make the row of each name, and write it at once: a run that is interrupted loses nothing."""
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in names:
        rows[name] = row(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        sys.stdout.write(f"{name}: {_failures(rows[name])}\n")
        sys.stdout.flush()


def _judge_hf(file: Path, names: list[str]) -> None:
    import torch

    from rollproof.replay.hf.hf_replay_trainer import HfTrainer
    from rollproof.replay.hf.hf_setups import SETUPS, setup_named
    from rollproof.replay.hf.ranked_trainer import RankedHfTrainer, hf_ranks

    torch.set_num_threads(1)
    with hf_ranks() as ranks:

        def row(name: str) -> dict[str, Any]:
            setup = setup_named(name)
            return trainer_row(
                judge_replay(
                    lambda: RankedHfTrainer(setup, ranks) if setup.parallel else HfTrainer(setup),
                    name=setup.name,
                ),
                packages=("torch", "transformers"),
                code="rollproof.replay.hf",
                parallel=setup.parallel and f"{setup.parallel}, 2 processes",
                model=f"{setup.family}, {setup.layout}, {setup.dtype}",
                mode="R3",
            )

        write_trainer_rows(file, names or SETUPS, row)


def _judge_megatron(file: Path, names: list[str]) -> None:
    from rollproof.replay.megatron.megatron_setups import (
        OTHERS,
        SETUPS,
        ReplayCodeName,
        setup_named,
    )
    from rollproof.replay.megatron.megatron_trainer import MegatronTrainer, megatron_ranks

    packages: Mapping[ReplayCodeName, tuple[str, ...]] = {
        ReplayCodeName.CORE: ("megatron-core", "torch"),
        ReplayCodeName.VERL: ("verl", "megatron-core", "torch"),
        ReplayCodeName.SKYRL: ("skyrl", "megatron-core", "torch"),
    }
    installed = [name for name, setup in OTHERS.items() if _installed(packages[setup.code])]
    for code, group in groupby(names or [*SETUPS, *installed], lambda name: setup_named(name).code):
        with megatron_ranks(code=code) as ranks:

            def row(name: str, ranks: Any = ranks) -> dict[str, Any]:
                setup = setup_named(name)
                return trainer_row(
                    judge_replay(lambda: MegatronTrainer(setup, ranks), name=setup.name),
                    packages=packages[setup.code],
                    code=setup.code,
                    parallel=setup.words,
                    model=(
                        f"{setup.router} routers in layers"
                        f" {', '.join(map(str, setup.moe_layers))} of {setup.num_layers},"
                        f" {setup.dispatcher}"
                    ),
                    mode=setup.mode,
                )

            write_trainer_rows(file, list(group), row)


def _judge_veomni(file: Path, names: list[str]) -> None:
    from rollproof.stacks.verl.veomni import SETUP, VeOmniTrainer

    def row(name: str) -> dict[str, Any]:
        return trainer_row(
            judge_replay(VeOmniTrainer, name=name),
            packages=("verl", "torch"),
            code="verl",
            parallel="",
            model=(
                f"{SETUP.router} routers in layers {', '.join(map(str, SETUP.moe_layers))} of"
                f" {SETUP.num_layers}, packed"
            ),
            mode="R3",
        )

    write_trainer_rows(file, names or ["verl-veomni"], row)


_TRAINERS: Mapping[str, Callable[[Path, list[str]], None]] = MappingProxyType(
    {"hf": _judge_hf, "megatron": _judge_megatron, "veomni": _judge_veomni}
)


def engine_rows(engine: str) -> list[str]:
    """Return the names of an engine's rows. Raises ``UsageError`` for an unknown engine."""
    targets = [name for name in REAL if name == engine or name.startswith(f"{engine}-")]
    if not targets:
        raise UsageError(
            f"No trainer or real engine is named {engine!r}; choose among {[*_TRAINERS, *REAL]}."
        )
    return [
        *targets,
        f"{engine} {_DTYPE}",
        *(f"{name} {family}" for name in targets for family in REAL[name].families),
    ]


def judge_engine_row(name: str) -> dict[str, Any]:
    """Run the row called ``name`` and return what it found, or why the engine did not start.

    Raises ``UsageError`` for an unknown name.
    """
    engine, _, variant = name.partition(" ")
    dtype, family = (variant, None) if variant == _DTYPE else ("float32", variant or None)
    with tempfile.TemporaryDirectory(prefix="rollproof-models-") as folder:
        target = engine_target(
            engine,
            model=None,
            folder=Path(folder),
            family=family,
            dtype=dtype,
            progress=_show_progress,
        )
        try:
            run = run_experiments(target, progress=_show_progress)
        except EngineStartError as error:
            return {
                "about": target.about,
                "not_started": one_line(str(error).partition("The end of its log")[0]),
            }
        return row_of(judged(target.name, run), run, target.about)


def _judge_engine(engine: str, file: Path, names: list[str]) -> None:
    rows = engine_rows(engine)
    for name in names or rows:
        start = time.monotonic()
        row = judge_engine_row(name)
        save_results(file, REAL[engine].packages, runs={name: row})
        text = row.get("not_started") or _failures(row)
        sys.stdout.write(f"{name}: {text} ({time.monotonic() - start:.0f} s)\n")
        sys.stdout.flush()


def _failures(row: Mapping[str, Any]) -> str:
    failed = [check for check, verdict in row["verdicts"].items() if verdict == "fail"]
    return ", ".join(failed) or "no check fails"


def _installed(packages: Iterable[str]) -> bool:
    try:
        return all(importlib.metadata.version(package) for package in packages)
    except importlib.metadata.PackageNotFoundError:
        return False


def _show_progress(progress: Progress) -> None:
    sys.stderr.write(f"  {progress.done}/{progress.total} {progress.what}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
