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
Without a GPU everything is skipped with the reason. Set `--rollproof-require-gpu` on a GPU runner:
then a test that cannot run on the host's GPUs fails, so that no green run is empty. Tests that need
more GPUs than the host has are left out. `--rollproof-gpus N` says how many GPUs the host should
have; if fewer are found, the session fails.

| file | judges |
|---|---|
| `test_engines.py` | vLLM and SGLang by the conformance of the [CPU runs](engines.md), in several settings; [more](#more-of-engines) |
| `test_trainers.py` | `hf_replay` on one GPU, under FSDP2 and DDP; megatron-core's `RouterReplay` over NCCL ([replay](replay.md)) |
| `test_gap.py` | the [gap](gap.md) between engines and trainers: native, R2, R3, three wrong replays; across a weight update |

A default run takes less than ten minutes on one GPU: both engines in their usual setting,
transformers, megatron-core, and the gap of all four pairs. On several GPUs it also runs some of
their multi-GPU trainers. `--rollproof-full` runs everything. Tests that are named on the command
line (`gpu_suites/test_engines.py::...`) always run. No test needs more than four GPUs; on a larger
host the first free ones are used. To run everything with a report: `nox -s gpu --
--rollproof-full --rollproof-require-gpu --rollproof-gpu-report report`. Tests do not run in
parallel (`-n` of pytest-xdist is refused), because they would take each other's GPUs.

Each engine has its own Python interpreter, because their dependencies conflict. Set
`ROLLPROOF_VLLM_PYTHON` and `ROLLPROOF_SGLANG_PYTHON` to them, and install rollproof in each
(`$ROLLPROOF_VLLM_PYTHON -m pip install --no-deps .`). `--rollproof-gpu-report DIR` writes
`run.json` and `run.html`. `python -m rollproof.gpu_suites.report.merging OUT run.json ...` merges
the reports of several shards, and makes the HTML page. [ci](ci/README.md) has workflows for GPU and
CPU runners.

A session prints at its start which GPUs it uses. It leaves alone GPUs that other processes use or
that another session of these suites has claimed, unless `ROLLPROOF_SHARE_GPUS=1`. A test that needs
more GPUs than are left says so. A session claims all free GPUs: to run several sessions at once,
give each its own GPUs with `CUDA_VISIBLE_DEVICES`.

`--rollproof-model DIR` measures the gap on your checkpoint instead of the generated one.
`--rollproof-trainer SPEC` measures it with one trainer: `hf`; `fsdp2-2`, `fsdp2-4`; `ulysses-2`,
`ulysses-4` (DeepSpeed's `UlyssesSPAttentionHF`, if DeepSpeed is installed); `megatron`,
`megatron-tp2`, ... on as many GPUs as the sizes require; or your own as `module:factory`. The
factory is called with a mapping of versions to checkpoint folders, and returns a trainer as
[gap.md](gap.md) describes it, such as `rollproof.gap.hf_trainer:HfTrainer`.

## More of engines

`test_engines.py` also runs:

- 256 concurrent calls that are aborted and resumed while the weights change;
- the same call alone and in a batch, with the engine's batch-invariant mode and without it;
- an engine whose processes are killed or stopped while it starts or samples;
- engines with tensor parallelism and with expert parallelism: their rows are compared with those of
  one GPU.
"""


def gpu_page() -> Iterator[str]:
    """Yield the lines of docs/gpu.md."""
    yield f"# GPU suites\n{_INTRO}"
    yield (
        "## Needs\n\nMarkers declare what a test needs. If something is missing, the test is skipped"
        " (or fails) with one line that says what.\n"
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
    yield "experiment is judged separately, and must continue to fail:\n"
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
        "\nThe limits of [gap.md](gap.md) are for trained models. A generated model amplifies"
        " rounding and breaks those of k3 and mean"
    )
    yield (
        "|d|, also with R3 (k3 is 0.003, and the limit 0.002). The suite asserts the effect of"
        " replay and of the controls, and that"
    )
    yield "self-replay is exact."


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _time(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "\n## Time\n\nTime in engines and trainers is theirs; all other time, also what no timer"
        ' covers, counts as rollproof\'s own ("ours"). Goal: a'
    )
    yield "default run on one GPU takes less than 600 s, of which less than 10 % are ours."
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
        "\nA check is unknown if its situation did not occur in the setting, or in bfloat16 if"
        " only an exact forward could decide it.\n"
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

**A matrix product in float32 on a GPU.** cuBLAS chooses a kernel by the number of rows, so the bits
of a row depend on how many other rows are in the product (see the runs below; in bfloat16 they did
not). megatron-core's `RouterReplay` needs a target for padding too. If routes are replayed sample by
sample, padding goes to other experts than in the recording pass, and the experts get other numbers
of rows: logprobs differ by up to 5.3e-5 in float32, and by 0 in bfloat16. So self-replay is measured
with every row, including padding, at its recorded place: it must be 0 in every dtype, and is. (The
4.9e-5 in the table is from an earlier run, sample by sample.)

**A call to vLLM in its batch-invariant mode, alone and in a batch.** In steps of up to 255 tokens
the results were equal to the last bit; in steps of 256 tokens and more they were not (see the runs
below). The cause is the norm named below, which is known upstream;
[track-record.md](track-record.md) has a program that shows it. The suite repeats the calls in
smaller steps, where nothing may differ, and nothing did.

**A step of a trainer with compiled attention, before and after a step of another width.**
`torch.compile(dynamic=True)` treats sizes that are equal in the first call as one size
(`torch.fx.experimental._config.use_duck_shape`). If the first batch is as wide as a head (8), the
code is compiled for width 8 only. Samples of two tokens then cause a second compilation for any
width. That code serves the first batch from then on, and sums it in another order on a GPU: a loss
differed by 4.8e-8 (see the runs below; by 0 without those samples, or with that setting off). The
suite's own trainer has the setting off. A trainer of yours that compiles may have to declare a
tolerance.

"""

_NOT_RUN = """
## Not run

- Grouped GEMM and the fused permute of megatron-core, with a row that has an id twice: 0.19.2 has
  both only in Transformer Engine (`TEGroupedMLP`, `fused_permute`), which the host did not have.
- FlashAttention as SGLang's backend: its library was not on the host (`vllm-flash` above is
  vLLM's).
- The replay checks with Ulysses: only its gap is judged, and its recordings are compared with those
  of one process. verl's own Ulysses patches FlashAttention 2, which the host did not have.
"""
