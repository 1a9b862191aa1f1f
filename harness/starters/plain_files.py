"""Test files that need no choices: batches, trainers, layout functions, corrections, gaps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from types import MappingProxyType

from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.layouts.functions import FUNCTIONS
from rollproof.layouts.layout_cases import layout_calls

__all__ = ["PLAIN_FILES", "plain_file"]

_BATCHES = '''\
"""Does our collation keep every token's logprob, mask and routes together? rollproof
makes samples of awkward lengths and ends, and looks for each of them in the batch.

Run it with `pytest {file}`. It passes as it is: put your own collation in the place of
`collate`, at the marks (1) to (3).
"""

import numpy as np

import rollproof


class OurBatches:
    """Joins our collation and rollproof."""

    # (1) What the samples have that your collation gets, and what stands in rows without a
    # captured route (`filler`). `rollproof contract fields` lists all values.
    contract = rollproof.Contract(
        rows="T-1",
        resume="client",
        versions="none",
        logprobs="raw",
        abort_surfaces=True,
        loss_mask=True,
        missing_logprobs="masked",
        kv_policy="recompute",
        layer_axis="all",
        num_layers=4,
        moe_layers=(1, 2, 3),
        num_experts=16,
        top_k=2,
        filler="minus-one",
        dtype="int16",
        provenance="as-sampled",
    )

    def collate(self, samples):
        # (2) Make a batch of `rollproof.Rollout`s with your own code.
        return collate(samples)

    def rows(self, batch):
        # (3) Say where in your batch each sample is: one BatchRow a sample.
        return [
            rollproof.BatchRow(
                request_id=name,
                token_ids=batch["input_ids"][i],
                attention=batch["attention_mask"][i],
                loss_mask=batch["loss_mask"][i],
                logprobs=batch["logprobs"][i],
                routes=None if batch["routes"] is None else batch["routes"][i],
            )
            for i, name in enumerate(batch["names"])
        ]


def collate(samples):
    """Pad on the right. It stands for your own collation."""
    width = max(sample.total for sample in samples)
    batch = {{
        "names": [sample.request_id for sample in samples],
        "input_ids": np.zeros((len(samples), width), np.int64),
        "attention_mask": np.zeros((len(samples), width), np.int64),
        "loss_mask": np.zeros((len(samples), width), np.int64),
        "logprobs": np.zeros((len(samples), width)),
        "routes": None,
    }}
    if any(sample.routes is not None for sample in samples):
        batch["routes"] = np.full((len(samples), width, 4, 2), -1, np.int16)
    for i, sample in enumerate(samples):
        begin, end = len(sample.prompt_ids), sample.total
        batch["input_ids"][i, :end] = [*sample.prompt_ids, *sample.response_ids]
        batch["attention_mask"][i, :end] = 1
        mask = sample.loss_mask if sample.loss_mask is not None else 1
        if sample.logprobs is None:
            mask = 0
        else:
            missing = np.isnan(sample.logprobs)
            batch["logprobs"][i, begin:end] = np.where(missing, 0.0, sample.logprobs)
            mask = np.where(missing, 0, mask)
        batch["loss_mask"][i, begin:end] = mask
        if sample.routes is not None:
            # more rows than tokens would fit as well, into the padding of a shorter sample
            if not end - 1 <= len(sample.routes) <= end:
                rows = len(sample.routes)
                raise ValueError(f"{{sample.request_id}}: {{rows}} rows of routes, {{end}} tokens")
            batch["routes"][i, : len(sample.routes)] = sample.routes
    return batch


class TestOurBatches(rollproof.BatchConformance):
    subject = OurBatches
'''

_TRAINER = '''\
"""Does our trainer execute the experts that the rollout engine recorded (routing replay)?
rollproof has it run steps, and looks at what each router chose.

Run it with `pytest {file}`. It passes as it is, because a numpy trainer stands in: put your
own in its place, at the marks (1) to (4). docs/replay-hf.md has a complete one.
"""

import rollproof
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.replay.contract import trainer_contract


class OurTrainer:
    """Joins our trainer and rollproof; each episode of steps begins with a new one."""

    # (1) The sizes of a small model, and how you replay: routes of the rollout (R3) or of your
    # own old-logprob pass (R2), what rows without a route do, and how you checkpoint.
    # `help(rollproof.replay.terms.ReplayTerms)` says what else may be declared.
    contract = trainer_contract(
        num_layers=3,
        moe_layers=(0, 1, 2),
        num_experts=8,
        top_k=2,
        vocab=96,
        mode="R3",
        free_rows="native",
        recompute=("none", "full"),
    )

    def __init__(self):
        # (2) Build your trainer with that model.
        self.trainer = ReplayTrainer()

    def run(self, step, spy):
        # (3) Run `step.microbatches` forward, and backward if `step.backward`; replay their
        # routes if `step.action` is `replay`. A hook on each router reports what it chose:
        # `spy.routed(layer, experts, tokens=...)`, inside `with spy.recomputing():` while the
        # backward pass computes it again. Return a `rollproof.replay.events.Outcome`.
        return self.trainer.run(step, spy)

    def set_weights(self, number):
        # (4) Load the weights numbered 0 (the first ones), 1, 2, ... (other ones), or -1
        # (NaN in the first gate).
        self.trainer.set_weights(number)


class TestOurTrainer(rollproof.ReplayConformance):
    subject = OurTrainer
'''

_LAYOUTS = '''\
"""Do our functions bring every token's routes to the rank and place where its router is?
rollproof calls them for meshes and sizes of its own, with cells that say where they belong.

Run it with `pytest {file}`. It passes as it is: put your own functions in the place of the
methods, at the marks (1) and (2).
"""

import numpy as np

import rollproof
from rollproof.layouts import Alignment, Layout, Mesh


class OurLayouts:
    """Joins our layout functions and rollproof."""

    # (1) Your conventions; cases vary the sizes. `help(rollproof.layouts.Layout)`.
    layout = Layout(
        num_layers=4,
        num_experts=64,
        top_k=2,
        context="contiguous",
        alignment=Alignment(by=("tp", "cp")),
        mesh=Mesh(tp=2),
    )

    # (2) Any of the functions that are listed at the end of this file; what a class does not
    # have is not judged.
    def complete(self, layout, routes, tokens):
        """Rows of one sample, one for each token: the last token was never forwarded."""
        if not tokens - 1 <= len(routes) <= tokens:
            raise ValueError(f"{{len(routes)}} rows of routes for {{tokens}} tokens")
        distinct = np.arange(routes.shape[-1])  # a router needs top_k different experts
        shape = (tokens - len(routes), *routes.shape[1:])
        return np.concatenate([routes, np.broadcast_to(distinct, shape)])


class TestOurLayouts(rollproof.ReplayLayoutConformance):
    subject = OurLayouts


# The functions, with what they get and return. Rows are (rows, columns, k): columns are those of
# the layout of the case, k is its top_k, or 1 in a side tensor of int64.
{functions}
'''

_CORRECTIONS = '''\
"""Are our importance weights those that we say? rollproof makes batches of awkward logprobs,
lengths and masks, and compares weights, mask and metrics with an exact result.

Run it with `pytest {file}`. It passes as it is: put your own function in the place of
`truncated_weights`, at the marks (1) and (2).
"""

import numpy as np

import rollproof
from rollproof.corrections import Correction, correction_contract


class OurCorrection:
    """Joins our correction and rollproof."""

    # (1) What your function promises: which ratio, at which level, with which bounds and
    # rejections. arrays="torch" passes tensors. docs/corrections.md has all terms, and those
    # of public stacks.
    contract = correction_contract(
        pair="old/rollout",
        level="token",
        upper=2.0,
        masked="zero",
        metrics={{"mean_weight": "weights-mean"}},
    )

    def correct(self, batch):
        # (2) Call your own function with these (sequences, tokens) arrays: `batch.rollout`,
        # `batch.old` and `batch.current` are logprobs, `batch.mask` says what is trained.
        weights = truncated_weights(batch.old, batch.rollout, batch.mask)
        mean = weights.sum() / max(batch.mask.sum(), 1)
        return Correction(weights=weights, metrics={{"mean_weight": mean}})


def truncated_weights(old, rollout, mask):
    """Truncated importance sampling. It stands for your own function."""
    ratio = np.exp(np.where(mask == 1, old - rollout, 0.0))
    return np.minimum(ratio, 2.0) * mask


class TestOurCorrection(rollproof.CorrectionConformance):
    subject = OurCorrection
'''

_GAP = '''\
"""How far are the trainer's logprobs from those of the rollout, for the same tokens?

Run it with `pytest {file}`. It passes as it is, on made-up numbers: put a step of your own
in the place of `sampled_and_scored`.
"""

import numpy as np


def sampled_and_scored():
    """Logprobs of the sampled tokens by the engine and by the trainer, (sequences, length),
    and a mask of the tokens that are trained on.
    """
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(0.3, (64, 200))
    trainer = np.minimum(rollout + 0.005 * rng.standard_normal(rollout.shape), 0.0)
    return rollout, trainer, np.ones(rollout.shape, bool)


def test_the_trainer_scores_what_the_engine_sampled(rollproof_gap):
    rollout, trainer, mask = sampled_and_scored()
    sequences, length = rollout.shape
    report = rollproof_gap(
        rollout.ravel(),
        trainer.ravel(),
        sequence_id=np.arange(sequences).repeat(length),
        mask=mask.ravel(),
        limits="dense-bf16",  # or moe-bf16, ...: `rollproof gap --help`
    )
    print(report.panel)
'''

PLAIN_FILES: Mapping[str, str] = MappingProxyType(
    {
        "batches": _BATCHES,
        "trainer": _TRAINER,
        "layouts": _LAYOUTS,
        "corrections": _CORRECTIONS,
        "gap": _GAP,
    }
)
"""Sources by style, with a place for the name of the file."""


def plain_file(subject: str, *, path: str) -> str:
    """Return the source of the test file for a subject; ``path`` is how a shell spells its name.

    Raises ``KeyError`` for a subject that has no such file.
    """
    source = PLAIN_FILES[subject]
    # made from the table of the functions when it is needed: it would slow every command down
    listed = _layout_functions() if source is _LAYOUTS else ""
    return source.format(file=path, functions=listed)


def _layout_functions() -> str:
    """Return every layout function as a comment: its signature, what it gets, what it returns."""
    lines: list[str] = []
    for name, function in FUNCTIONS.items():
        # a real call has the names of the arguments
        call = next(layout_calls(name, MegatronLike.layout))
        signature = ", ".join(["layout", *function.arguments(call)])
        text = f"{name}({signature}): {function.does}"
        lines += textwrap.wrap(
            text, 96, initial_indent="# ", subsequent_indent="#     ", break_on_hyphens=False
        )
    return "\n".join(lines)
