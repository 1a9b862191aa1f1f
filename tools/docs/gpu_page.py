"""The page docs/gpu.md: how to run the GPU suites, and the results of ``docs/runs/*.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollproof.gpu_suites.engine_variants import KNOWN, NO_FLOAT32, VARIANTS
from rollproof.gpu_suites.invariance import INVARIANT
from rollproof.gpu_suites.requirements import MARKERS

__all__ = ["gpu_page"]

RUNS = Path(__file__).parents[2] / "docs" / "runs"
_INTRO = """
Real engines and real trainers on NVIDIA GPUs: `nox -s gpu`, or `python -m pytest gpu_suites`. `nox
-s gpu --no-venv` installs nothing and needs no network: it takes what the host's Python has.
Without a GPU everything is skipped with the reason; `--rollproof-require-gpu`, which a GPU runner
should set, makes whatever could not be run on the host's GPUs a failure, so that no green run is
empty. What needs more GPUs than the host has is left out; `--rollproof-gpus N` says how many it is
to have, more than are found being a failure too.

| file | judges |
|---|---|
| `test_engines.py` | vLLM and SGLang by the conformance of the [CPU runs](engines.md), in several settings; [more](#more-of-engines) |
| `test_trainers.py` | `hf_replay` on one GPU, under FSDP2 and DDP; megatron-core's `RouterReplay` over NCCL ([replay](replay.md)) |
| `test_gap.py` | the [gap](gap.md) between engines and trainers: native, R2, R3, three wrong replays; across a weight update |

By itself a run takes what one GPU does in less than ten minutes: both engines in their usual
setting, transformers, megatron-core, and the gap of all four pairs; on several GPUs some of their
trainers too. `--rollproof-full` runs everything, and what is named on the command line
(`gpu_suites/test_engines.py::...`) is run in any case. Nothing needs more than four GPUs; of a
larger host the first free ones are taken. On such a host, everything, with a report: `nox -s gpu --
--rollproof-full --rollproof-require-gpu --rollproof-gpu-report report`. Suites are not run side by
side (`-n` of pytest-xdist is refused): they would take each other's cards.

Engines live in interpreters of their own (their dependencies exclude each other):
`ROLLPROOF_VLLM_PYTHON` and `ROLLPROOF_SGLANG_PYTHON` name them, and each must be able to import
rollproof too (`$ROLLPROOF_VLLM_PYTHON -m pip install --no-deps .`). `--rollproof-gpu-report DIR`
keeps `run.json` and `run.html`; `python -m rollproof.gpu_suites.report.merging OUT run.json ...`
makes one report of several shards, and the page of a `run.json`. [ci](ci/README.md) has workflows
for GPU and for CPU runners.

A session says at its start which cards it takes. Cards that other processes use, and those that
another session of these suites has claimed, are left alone, unless `ROLLPROOF_SHARE_GPUS=1`; what
needs more than are left says so. The first session claims all that are free: of several at once
give each its own by `CUDA_VISIBLE_DEVICES`.

`--rollproof-model DIR` measures the gap on a checkpoint of yours in place of the generated one, and
`--rollproof-trainer SPEC` with one trainer: `hf`; `fsdp2-2`, `fsdp2-4`, and `ulysses-2`,
`ulysses-4` (DeepSpeed's `UlyssesSPAttentionHF`, where DeepSpeed is installed); `megatron`,
`megatron-tp2`, ... on as many GPUs as its sizes say; or your own as `module:factory`. The factory
is called with the checkpoints' folders by version and returns what [gap.md](gap.md) calls a
trainer; `rollproof.gap.hf_trainer:HfTrainer` is one.

## More of engines

256 calls at once that are aborted and resumed while the weights change; a call alone and beside
others, in the engine's mode of batch invariance and without it; an engine whose processes are
killed, or stopped, while it starts or samples; engines divided over GPUs, by tensors and by
experts, whose rows are held against those of one.
"""


def gpu_page() -> Iterator[str]:
    """Yield the lines of docs/gpu.md."""
    yield f"# GPU suites\n{_INTRO}"
    yield (
        "## Needs\n\nA test says what it needs by markers, and is skipped, or fails, with one line"
        " that says what is missing.\n"
    )
    for text in MARKERS.values():
        signature, _, meaning = text.partition(": ")
        yield f"- `{signature}`: {meaning}"
    yield "\n## Settings of engines\n\n| setting | what | engines | run |\n|---|---|---|---|"
    for variant in VARIANTS.values():
        engines = ", ".join(f"{engine} ({variant.dtype_of(engine)})" for engine in variant.extra)
        yield (
            f"| {variant.name} | {variant.about} | {engines} |"
            f" {'with `--rollproof-full`' if variant.full else 'always'} |"
        )
    for engine, reason in NO_FLOAT32.items():
        yield f"\nValues of {engine} are not compared with the float32 forward: {reason}."
    yield (
        "\nKnown failures, described in [track-record.md](track-record.md) with scripts that show"
        " them outside rollproof. Such an"
    )
    yield "experiment is judged apart, and must continue to fail:\n"
    for flavour, failures in KNOWN.items():
        for name, failure in failures.items():
            yield f"- {flavour}, `{name}`: {', '.join(failure.checks)}. {failure.reason}"
    runs = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RUNS.glob("*.json"))
    }
    yield _MODES
    for mode in INVARIANT.values():
        if mode.known:
            yield f"- {mode.name}: {mode.known}."
    yield from _gap(runs)
    yield from _time(runs)
    yield from _suites(runs)
    yield _NOT_RUN


def _gap(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "\n## The gap\n\nA generated Qwen3-MoE (8 layers, 64 experts, top 8, hidden 512, sharpened"
        " head), 128 sequences of 288"
    )
    yield (
        "sampled tokens; across an update 64 of 144. k3 = mean of exp(d) - 1 - d, d = trainer -"
        " rollout logprob. Ratios are those of k3"
    )
    yield (
        "to native routing on the same tokens, with 95 % intervals over sequences; controls are"
        " routes shifted by a token, by a layer,"
    )
    yield (
        "and permuted. Self-replay is the largest difference of a logprob between a recording pass"
        " and its replay, row by row.\n"
    )
    yield (
        "| engine | trainer | dtype | native k3 | R3 k3 | R3 / native | controls / native |"
        " self-replay | run |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for run, data in runs.items():
        for cell in data["gap"]:
            effect = cell["effect"]["effects"][0]
            controls = (
                ", ".join(f"{row[0]['ratio']:.0f}" for row in cell["effect"]["controls"].values())
                or "–"
            )
            engine = f"{cell['engine']}, {cell['about']}" if cell["about"] else cell["engine"]
            k3 = [
                f"{cell['reports'][mode]['metrics']['kl_mu_pi_k3']['value']:.3g}"
                for mode in ("native", "R3")
            ]
            ratio = f"{effect['ratio']:.3f} ({effect['low']:.3f} to {effect['high']:.3f})"
            cells = (
                engine,
                cell["trainer"],
                cell["dtype"],
                *k3,
                ratio,
                controls,
                _number(cell["self_replay_max_abs"]),
                run,
            )
            yield f"| {' | '.join(cells)} |"
    yield (
        "\nThe limits of [gap.md](gap.md) are those of trained models. A generated one amplifies"
        " rounding and breaks them in k3 and mean"
    )
    yield (
        "|d|, with R3 too (k3 0.003 where 0.002 is the limit); asserted are the effect of replay"
        " and of the controls, and that"
    )
    yield "self-replay is exact."


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _time(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "\n## Time\n\nWhat engines and trainers take is theirs; all else counts as rollproof's own,"
        " with whatever nobody counted. Goal: a"
    )
    yield "default run on one GPU in less than 600 s, of which less than 10 % are ours."
    for run, data in runs.items():
        if data.get("seconds_ours"):
            share = 100 * data["seconds_ours"] / data["seconds"]
            yield (
                f"\n{run}: {data['seconds']:.0f} s, of which {data['seconds_ours']:.0f} s"
                f" ({share:.1f} %) ours.\n"
            )
            yield "| part | s |\n|---|---|"
            yield from (f"| {part} | {seconds:.1f} |" for part, seconds in data["spent"].items())


def _suites(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "\n## Verdicts\n\n| run | subject | pass | fail | unknown | not applicable"
        " |\n|---|---|---|---|---|---|"
    )
    for run, data in runs.items():
        for suite in data["suites"]:
            counts = [
                str(suite["summary"][key]) for key in ("pass", "fail", "unknown", "not_applicable")
            ]
            yield f"| {run} | {suite['subject']} | {' | '.join(counts)} |"
    yield (
        "\nUnknown: what the setting did not bring about, and in bfloat16 what only an exact"
        " forward could tell.\n"
    )
    for run, data in runs.items():
        machine = data["machine"]
        cards = {
            gpu["name"]: sum(other["name"] == gpu["name"] for other in machine["gpus"])
            for gpu in machine["gpus"]
        }
        hardware = ", ".join(f"{count} x {name}" for name, count in cards.items())
        versions = ", ".join(
            f"{name} {version}"
            for name, version in machine["versions"].items()
            if name != "rollproof"
        )
        yield (
            f"- [{run}](runs/{run}.json) ({data['began']}): {hardware}, driver {machine['driver']},"
            f" Python {machine['python']}; {versions}."
        )
        yield from (f"  - {note}" for note in data["notes"])


_MODES = """
## Three things that are not bit for bit, and why

A product in float32 on a GPU: cuBLAS chooses a kernel by the number of rows, so the bits of a row
depend on how many rows stand beside it (runs below; in bfloat16 they did not). megatron-core's
`RouterReplay` gives padding a target too. Replayed sample by sample, padding goes to other experts
than it went to while routes were recorded, and experts get another number of rows: logprobs differ
by up to 5.3e-5 in float32, by 0 in bfloat16. So self-replay is taken with every row, padding too,
where it was: it must be 0 in every dtype, and is. (The 4.9e-5 in the table was measured before,
sample by sample.)

A call to vLLM in its mode of batch invariance, alone and beside others: in steps of up to 255
tokens it is answered alike to the last bit, in steps of 256 and more it was not (runs below): the
norm named below, known upstream, shown by a program in [track-record.md](track-record.md). The
suite asks such an engine again in smaller steps, where nothing may differ, and nothing did.

A step of a trainer with compiled attention, before and after a step of another width.
`torch.compile(dynamic=True)` takes sizes that are equal at first for one size
(`torch.fx.experimental._config.use_duck_shape`). A first batch as wide as a head (8) is added to
tensors of head size, and so 8 becomes the only width of that code; samples of two tokens make other
code, for any width, which then serves the first batch too, and on a GPU sums it in another order: a
loss differed by 4.8e-8 (runs below; without those samples, or with that setting off, by 0). The
suite's own trainer has the setting off. A trainer of yours that compiles may have to declare a
tolerance.

"""

_NOT_RUN = """
## Not run

- Grouped GEMM and the fused permute of megatron-core, with ids that a row has twice: in 0.19.2 both
  are Transformer Engine's alone (`TEGroupedMLP`, `fused_permute`), which the host did not have.
- FlashAttention as SGLang's backend: its library was not on the host (`vllm-flash` above is
  vLLM's).
- Ulysses under the replay checks: it is held to the gap, and its recordings to those of one
  process. verl's own Ulysses patches FlashAttention 2, which the host did not have.
"""
