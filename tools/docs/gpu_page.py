"""The page docs/gpu.md: how to run the GPU suites, and the results of ``docs/runs/*.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollproof.gpu_suites.engine_variants import NO_FLOAT32, VARIANTS

__all__ = ["gpu_page"]

RUNS = Path(__file__).parents[2] / "docs" / "runs"
_INTRO = """
How to judge real engines and real trainers on NVIDIA GPUs, and what came out on H200s.

| file | judges |
|---|---|
| `test_engines.py` | vLLM and SGLang as in the [CPU runs](engines.md), in several settings; under load while weights change; alone and in a batch; killed or stopped; tensor and expert parallelism |
| `test_trainers.py` | `hf_replay` on one GPU, under FSDP2 and DDP; megatron-core's `RouterReplay` over NCCL ([replay](replay.md)) |
| `test_gap.py` | the [gap](gap.md) between engines and trainers: native, R2, R3, three wrong replays; across a weight update |

## Run them

```
nox -s gpu                                     # or: python -m pytest gpu_suites
nox -s gpu --no-venv                           # installs nothing: what the host's Python has
nox -s gpu -- --rollproof-full --rollproof-require-gpu --rollproof-gpu-report report
```

- Without a GPU everything is skipped (`--rollproof-require-gpu`: fails); `--rollproof-gpus N` fails if fewer are found. Tests that need more GPUs
  than the host has are left out; none needs more than four.
- A default run takes less than ten minutes on one GPU; `--rollproof-full`, or naming tests, runs more. `-n` is refused.
- The dependencies of the engines conflict: set `ROLLPROOF_VLLM_PYTHON` and `ROLLPROOF_SGLANG_PYTHON`, and install rollproof in each
  (`$ROLLPROOF_VLLM_PYTHON -m pip install --no-deps .`).
- A session claims all free GPUs (`ROLLPROOF_SHARE_GPUS=1`: used ones too); give each of several sessions its own with `CUDA_VISIBLE_DEVICES`.
- `--rollproof-gpu-report DIR` writes `run.json` and `run.html`; `python -m rollproof.gpu_suites.report.merging OUT run.json ...` joins the
  reports of shards. `.github/workflows/gpu.yml` is a workflow to copy: change its
  `runs-on` to the labels of your runner.
- `--rollproof-model DIR` measures the gap on your checkpoint. `--rollproof-trainer SPEC` takes one trainer: `hf`, `fsdp2-2`, `fsdp2-4`,
  `ulysses-2`, `ulysses-4` (DeepSpeed), `megatron`, `megatron-tp2`, ..., or your own `module:factory`: from a mapping of versions to checkpoint
  folders it makes a [trainer](gap.md#scored-by-a-trainer).
"""


def gpu_page() -> Iterator[str]:
    """Yield the lines of docs/gpu.md."""
    yield f"# GPU suites\n{_INTRO}"
    yield (
        "\n## Settings of engines\n\nThose with a star are run with `--rollproof-full` only.\n\n"
        "| setting | what | engines |\n|---|---|---|"
    )
    for variant in VARIANTS.values():
        engines = ", ".join(f"{engine} ({variant.dtype_of(engine)})" for engine in variant.extra)
        yield f"| {variant.name}{'*' if variant.full else ''} | {variant.about} | {engines} |"
    for engine, reason in NO_FLOAT32.items():
        yield f"\nValues of {engine} are not compared with the float32 forward: {reason}."
    yield (
        "\nKnown failures ([track record](track-record.md#on-gpus-vllm-0260-sglang-0517)) are judged"
        " separately, and must continue to fail."
    )
    runs = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RUNS.glob("*.json"))
    }
    yield _MODES
    yield from _gap(runs)
    yield from _time(runs)
    yield from _suites(runs)
    yield _NOT_RUN


def _gap(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "\n## The gap\n\nA generated Qwen3-MoE (8 layers, 64 experts, top 8, hidden 512, sharpened"
        " head), 128 sequences of 288 sampled tokens; across an update 64 of 144. k3 = mean of"
        " exp(d) - 1 - d, d = trainer - rollout logprob. Ratios are those of k3 to native routing on"
        " the same tokens; controls are routes shifted by a token, by a layer, and permuted (the"
        " smallest ratio is shown). Self-replay is the largest difference of a logprob between a"
        " recording pass and its replay. A row has the range over its trainers, their splits over GPUs,"
        " and runs.\n"
    )
    yield (
        "| engine | dtype | trainers | native k3 | R3 k3 | R3 / native | controls | self-replay |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for data in runs.values():
        for cell in data["gap"]:
            engine = f"{cell['engine']}, {cell['about']}" if cell["about"] else cell["engine"]
            rows.setdefault((engine, cell["dtype"]), []).append(cell)
    for (engine, dtype), cells in sorted(rows.items()):
        trainers = ", ".join(
            name if count == 1 else f"{name} ({count} splits)"
            for name, count in Counter(
                trainer.partition(" ")[0] for trainer in sorted({cell["trainer"] for cell in cells})
            ).items()
        )
        k3 = [
            _range(cell["reports"][mode]["metrics"]["kl_mu_pi_k3"]["value"] for cell in cells)
            for mode in ("native", "R3")
        ]
        ratio = _range(cell["effect"]["effects"][0]["ratio"] for cell in cells)
        controls = [
            row[0]["ratio"] for cell in cells for row in cell["effect"]["controls"].values()
        ]
        same = [
            cell["self_replay_max_abs"] for cell in cells if cell["self_replay_max_abs"] is not None
        ]
        worst = f"{min(controls):,.0f}" if controls else "–"
        replayed = f"{max(same):.2g}" if same else "–"
        columns = (engine, dtype, trainers, *k3, ratio, worst, replayed)
        yield f"| {' | '.join(columns)} |"
    yield (
        "\nA generated model amplifies rounding beyond [limits](gap.md#limits) that are for trained"
        " ones: the suite asserts the effect of replay and of the controls, and that self-replay is"
        " exact."
    )


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    low, high = f"{found[0]:.2g}", f"{found[-1]:.2g}"
    return low if low == high else f"{low} to {high}"


def _time(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "\n## Time\n\nTime in engines and trainers is theirs; all other time counts as rollproof's"
        ' own ("ours"). Goal: a default run on one GPU takes less than 600 s, less than 10 % of it'
        " ours."
    )
    for run, data in runs.items():
        if data.get("seconds_ours"):
            share = 100 * data["seconds_ours"] / data["seconds"]
            yield (
                f"\n{run}: {data['seconds']:.0f} s, of which {data['seconds_ours']:.0f} s"
                f" ({share:.1f} %) ours."
            )


def _suites(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "\n## Verdicts\n\nA check is unknown if its situation did not occur in the setting, or in"
        " bfloat16 if only an exact forward could decide it. Each file has the verdicts of every"
        " subject, and notes on what else was tried.\n\n"
        "| run | GPUs | subjects | pass | fail | unknown | failed |\n|---|---|---|---|---|---|---|"
    )
    for run, data in runs.items():
        counts = [
            str(sum(suite["summary"][key] for suite in data["suites"]))
            for key in ("pass", "fail", "unknown")
        ]
        failed = ", ".join(suite["subject"] for suite in data["suites"] if suite["summary"]["fail"])
        cells = (
            f"[{run}](runs/{run}.json)",
            str(len(data["machine"]["gpus"])),
            str(len(data["suites"])),
            *counts,
            failed,
        )
        yield f"| {' | '.join(cells)} |"
    machine = next(iter(runs.values()))["machine"]
    versions = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items() if name != "rollproof"
    )
    yield (
        f"\n{machine['gpus'][0]['name']}, driver {machine['driver']}, Python {machine['python']};"
        f" {versions}. `attention compiled` failed as torch compiles it, and passes with"
        " `use_duck_shape` off (above)."
    )


_MODES = """
## Three things that are not bit for bit, and why

- **A matrix product in float32.** cuBLAS chooses a kernel by the number of rows. With replay sample by sample, padding goes to other experts
  than in the recording pass, so logprobs differ by up to 5.3e-5 in float32. Row by row, padding included, self-replay is 0.
- **A call to vLLM in batch-invariant mode, alone and in a batch.** Equal to the bit in steps of up to 255 tokens only
  ([track record](track-record.md#on-gpus-vllm-0260-sglang-0517), 6).
- **A step with compiled attention, after a step of another width.** `torch.compile(dynamic=True)` treats sizes that are equal in the first
  call as one (`use_duck_shape`), and compiles again: a loss differed by 4.8e-8. A trainer that compiles may have to declare a tolerance.
"""

_NOT_RUN = """
## Not run

Grouped GEMM and the fused permute of megatron-core 0.19.2 with a row that has an id twice (they need Transformer Engine); FlashAttention as
SGLang's backend; the replay checks with Ulysses (only its gap); verl's own Ulysses, which patches FlashAttention 2.
"""
