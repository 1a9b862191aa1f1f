"""Writes docs/corrections.md: how a correction for off-policy rollouts is judged, and what it may
declare.
"""

from __future__ import annotations

from collections.abc import Iterator

import rollproof
from rollproof.core import correction_terms
from rollproof.core.correction_records import Correction, CorrectionBatch
from rollproof.core.correction_terms import CorrectionTerms, Rejection
from tools.docs.docstrings import described_fields, markdown
from tools.docs.enum_texts import term_lines

__all__ = ["corrections_page"]

_INTRO = """
How to judge the function that corrects for off-policy rollouts: its importance weights, what it truncates, masks or rejects, and the numbers
that it reports. It fails silently: weights of the wrong pair of logprobs, or a mean that counts padding, still train.

| entry point | |
|---|---|
| a test to start from | `rollproof init corrections` |
| command line | `rollproof verify --subject my_module:MyCorrection` |
| pytest | `class TestMine(rollproof.CorrectionConformance): subject = MyCorrection` |
| program | `rollproof.judge_corrections(MyCorrection)` |
| one function, without a class | `rollproof.judge_corrections(rollproof.correction_function(my_function, upper=2.0))` |

## In ten lines

```python
import torch
import rollproof
from rollproof.corrections import Correction, correction_contract


class MyCorrection:
    contract = correction_contract(  # what it promises
        pair="old/rollout", level="token", upper=2.0, arrays="torch", metrics={"is_mean": "weights-mean"}
    )  # fmt: skip

    def correct(self, batch):  # also has .current, .advantages, .groups and .versions
        with torch.no_grad():
            weights = torch.exp((batch.old - batch.rollout) * batch.mask).clamp(max=2.0)
        mean = (weights * batch.mask).sum() / batch.mask.sum()
        return Correction(weights=weights, metrics={"is_mean": mean})


report = rollproof.judge_corrections(MyCorrection)
assert not report.failed
```

Each batch tests one situation: bounds, rejections, masked places, empty and untrained sequences, overflow, several versions, missing logprobs.
The exact result is computed in float64; tolerances are derived from the declared type (`rollproof.corrections.rounding`), and what rounding
could decide is not judged. Gradients of tensors are judged, too ([checks](checks.md#correction)).

## What the stacks call it

| here | verl `rollout_correction` | TRL `vllm_importance_sampling_*` | AReaL `rejection_sampling` | OpenRLHF `is_correction_*` | slime, miles |
|---|---|---|---|---|---|
| `level="token"` | `rollout_is: token` | `mode: token_*` | `level: token` | `level: token` | `--use-tis` |
| `level="sequence"` | `rollout_is: sequence` | `mode: sequence_*` | | | `tis_level: sequence` |
| `level="geometric"` | | | `level: sequence`, `metric: ratio` | | `tis_level: geometric` |
| `upper`, `lower` | `rollout_is_threshold: 2.0` | `*_truncate`, `clip_max`, `clip_min` | `action: clamp` | `mode: clip` | `--tis-clip`, `--tis-clip-low` |
| `Rejection` of `ratio`, by `weights` | `rollout_is_threshold: "0.5_5.0"` | `*_mask` | | `mode: mask` | `icepop_function` |
| `Rejection` of `k1`, `k2`, `k3`, by `mask` | `rollout_rs: token_k1`, `seq_mean_k3`, ... | | `metric: kl_k1`, ..., `action: mask` | `gating: binary_kl`, `tv` | `use_rs` |
| `Rejection` of `ratio`, `aggregate="min"` | a veto | | | | `rs_veto_threshold` |
| `normalise` | `rollout_is_batch_normalize` | | | | `tis_batch_normalize` |
| `pair="current/rollout"` | `bypass_mode` | | | | `--use-rollout-logprobs` |
| `pair="interpolated/rollout"` | | | `prox_logp_method: loglinear` | | |

verl bounds `k1` by the logarithm of its thresholds: `rollout_rs_threshold: "0.5_2.0"` is `Rejection(statistic="k1", lower=log(0.5),
upper=log(2.0))`, bounds of the rollout's probability over the trainer's.
"""


def corrections_page() -> Iterator[str]:
    """docs/corrections.md."""
    yield f"# Corrections for off-policy rollouts\n{_INTRO}"
    yield "\n## What you write\n"
    yield markdown(rollproof.CorrectionSubject.__doc__)
    yield (
        "\n`rollproof.corrections.correction_contract(...)` makes the contract from these terms"
        " (in brackets: the default)."
    )
    for record in (CorrectionTerms, Rejection):
        text, _ = described_fields(record.__doc__)
        yield f"\n### {record.__name__}\n\n{markdown(text)}\n"
        yield from term_lines(record, correction_terms)
    yield "\n## What it gets and returns\n"
    for cls in (CorrectionBatch, Correction):
        text, meanings = described_fields(cls.__doc__)
        yield f"\n### {cls.__name__}\n\n{markdown(text)}\n"
        yield from (f"- `{name}`: {meaning}" for name, meaning in meanings.items())
