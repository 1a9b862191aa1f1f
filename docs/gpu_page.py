"""Writes docs/gpu.md: how the GPU suites are run, and what the runs in ``runs/*.json`` found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollproof.gpu_suites.engines import KNOWN, NO_FLOAT32, VARIANTS
from rollproof.gpu_suites.needs import MARKERS

__all__ = ["gpu_page"]

RUNS = Path(__file__).parent / "runs"
_INTRO = """
Real engines and real trainers on NVIDIA GPUs: `nox -s gpu`, or `python -m pytest gpu_suites`. `nox -s gpu --no-venv` installs nothing
and needs no network: it takes what the host's Python has. Without a GPU everything is skipped with the reason;
`--rollproof-require-gpu`, which a GPU runner should set, makes whatever could not be run a failure, so that no green run is empty.

| file | judges |
|---|---|
| `test_engines.py` | vLLM and SGLang by the conformance of the [CPU runs](engines.md), in several settings; under load; vLLM over GPUs |
| `test_trainers.py` | `hf_replay` on one GPU, under FSDP2 and DDP; megatron-core's `RouterReplay` over NCCL ([replay](replay.md)) |
| `test_gap.py` | the [gap](gap.md) between engines and trainers: native, R2, R3, three wrong replays; across a weight update |

Engines live in interpreters of their own (their dependencies exclude each other): `ROLLPROOF_VLLM_PYTHON` and `ROLLPROOF_SGLANG_PYTHON`
name them, and each must be able to import rollproof too. `--rollproof-model DIR` measures the gap on a checkpoint of yours in place of the
generated one. `--rollproof-gpu-report DIR` keeps `run.json` and `run.html`; `python -m rollproof.gpu_suites.merging OUT run.json ...` makes
one report of several shards. Cards that other processes use are left alone, unless `ROLLPROOF_SHARE_GPUS=1`.
[ci/](ci) has workflows for GPU and for CPU runners.
"""


def gpu_page() -> Iterator[str]:
    """docs/gpu.md."""
    yield f"# GPU suites\n{_INTRO}"
    yield "## Needs\n\nA test says what it needs by markers, and is skipped, or fails, with one line that says what is missing.\n"
    for text in MARKERS.values():
        signature, _, what = text.partition(": ")
        yield f"- `{signature}`: {what}"
    yield "\n## Settings of engines\n\n| setting | what | engines |\n|---|---|---|"
    for one in VARIANTS.values():
        yield f"| {one.name} | {one.about} | {', '.join(f'{engine} ({one.dtype_of(engine)})' for engine in one.extra)} |"
    for engine, why in NO_FLOAT32.items():
        yield f"\nOf {engine}, values are not held against the float32 forward: {why}."
    yield "\nKnown to fail, each reproduced by hand in [track-record.md](track-record.md); such an experiment is judged apart, and"
    yield "must go on failing:\n"
    for flavour, known in KNOWN.items():
        for name, fault in known.items():
            yield f"- {flavour}, `{name}`: {', '.join(fault.checks)}. {fault.reason}"
    runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*.json"))}
    yield from _gap(runs)
    yield from _suites(runs)


def _gap(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "\n## The gap\n\nA generated Qwen3-MoE (8 layers, 64 experts, top 8, hidden 512, sharpened head), 128 sequences of 288"
    yield "sampled tokens; across an update 64 of 144. k3 = mean of exp(d) - 1 - d, d = trainer - rollout logprob. Ratios are those of k3"
    yield "to native routing on the same tokens, with 95 % intervals over sequences; controls are routes shifted by a token, by a layer,"
    yield "and permuted. Self-replay is the largest difference of a logprob between a recording pass and its replay.\n"
    yield "| engine | trainer | dtype | native k3 | R3 k3 | R3 / native | controls / native | self-replay | run |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for run, data in runs.items():
        for cell in data["gap"]:
            effect = cell["effect"]["effects"][0]
            controls = ", ".join(f"{row[0]['ratio']:.0f}" for row in cell["effect"]["controls"].values()) or "–"
            engine = f"{cell['engine']}, {cell['about']}" if cell["about"] else cell["engine"]
            k3 = [f"{cell['reports'][mode]['metrics']['kl_mu_pi_k3']['value']:.3g}" for mode in ("native", "R3")]
            ratio = f"{effect['ratio']:.3f} ({effect['low']:.3f} to {effect['high']:.3f})"
            cells = (engine, cell["trainer"], cell["dtype"], *k3, ratio, controls, f"{cell['self_replay_max_abs']:g}", run)
            yield f"| {' | '.join(cells)} |"
    yield "\nThe limits of [gap.md](gap.md) are those of trained models. A generated one amplifies rounding and breaks them in k3 and mean"
    yield "|d|, with R3 too (k3 0.003 where 0.002 is the limit); asserted are the effect of replay and of the controls, and that"
    yield "self-replay is exact."


def _suites(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "\n## Verdicts\n\n| run | subject | pass | fail | unknown | not applicable |\n|---|---|---|---|---|---|"
    for run, data in runs.items():
        for suite in data["suites"]:
            counts = [str(suite["summary"][key]) for key in ("pass", "fail", "unknown", "not_applicable")]
            yield f"| {run} | {suite['subject']} | {' | '.join(counts)} |"
    yield "\nUnknown: what the setting did not bring about, and in bfloat16 what only an exact forward could tell.\n"
    for run, data in runs.items():
        machine = data["machine"]
        cards = {gpu["name"]: sum(one["name"] == gpu["name"] for one in machine["gpus"]) for gpu in machine["gpus"]}
        told = ", ".join(f"{count} x {name}" for name, count in cards.items())
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if name != "rollproof")
        yield f"- [{run}](runs/{run}.html) ({data['began']}): {told}, driver {machine['driver']}, Python {machine['python']}; {versions}."
        yield from (f"  - {note}" for note in data["notes"])
