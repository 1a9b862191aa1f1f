"""A Megatron trainer with routing replay as a subject under test, on several processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from rollproof.core.contract import Contract, Rows
from rollproof.core.events.replay import Action, Outcome, Step
from rollproof.core.records import IntArray, Rollout
from rollproof.core.router_spy import Spy, UnsupportedStep, direction, sketch
from rollproof.errors import RouterError, RoutesError, UsageError
from rollproof.layouts.mesh import Rank
from rollproof.replay.megatron.megatron_setups import (
    UNSUPPORTED,
    MegatronSetup,
    ReplayCodeName,
    setup_named,
)
from rollproof.replay.megatron.microbatches import lengths_of, samples_by_microbatch
from rollproof.replay.megatron.model_weights import gate_name, undivided_gradients
from rollproof.replay.megatron.plain_model import reference_losses
from rollproof.replay.megatron.rank_step import Answer, Job
from rollproof.replay.megatron.rank_worker import worker
from rollproof.replay.plans import DENSE
from rollproof.replay.process_group import RankError, Ranks

__all__ = ["MegatronTrainer", "megatron_ranks"]

_EPISODES = count()


_IMPORTED: Mapping[ReplayCodeName, tuple[str, ...]] = {
    ReplayCodeName.VERL: ("verl.utils.megatron.router_replay_utils",)
}
"""Modules of other replay code that take seconds to import. They patch nothing of megatron-core."""


def megatron_ranks(
    limit_s: float = 120.0, *, cuda: bool = False, code: ReplayCodeName = ReplayCodeName.CORE
) -> Ranks:
    """Return processes for Megatron trainers, with ``cuda`` on a GPU each. Close them when done.

    Any setup runs on any of them; they import the replay ``code`` in advance.
    """
    return Ranks(
        worker,
        preload=(
            "rollproof.replay.megatron.rank_worker",
            "megatron.core.models.gpt.gpt_layer_specs",
            "megatron.core.models.gpt.gpt_model",
            "megatron.core.pipeline_parallel",
            *_IMPORTED.get(code, ()),
        ),
        limit_s=limit_s,
        cuda=cuda,
    )


class MegatronTrainer:
    """A ``ReplaySubject`` on megatron-core.

    Trainers may share ``ranks`` if one runs at a time.
    """

    def __init__(self, setup: MegatronSetup | str, ranks: Ranks) -> None:
        self.setup: MegatronSetup = setup_named(setup) if isinstance(setup, str) else setup
        self.contract: Contract = self.setup.contract()
        self._ranks = ranks
        self._episode = f"episode {next(_EPISODES)}"
        self._number = 0
        self._nudges: tuple[tuple[int, float], ...] = ()

    def run(self, step: Step, spy: Spy) -> Outcome:
        """Run one step on all ranks. Raises the exception of a rank, or ``RankError``."""
        if step.action is Action.REPLAY and self.setup.code is ReplayCodeName.CORE:
            for sample in step.samples:
                self._check_routes(sample)
        return self._run_step(step, spy)

    def set_weights(self, number: int) -> None:
        """See ``ReplaySubject``. Weights depend on ``number`` and a parameter's name only."""
        self._number, self._nudges = number, ()

    def nudge(self, layer: int, size: float) -> None:
        """See ``ReplaySubject``."""
        self._nudges = (*self._nudges, (layer, size))

    def replay_in_place(self, step: Step, spy: Spy) -> Outcome:
        """Replay what each rank recorded in its last recording step, padding too.

        The samples must be those of that step; their routes are not used. Every row executes what
        it recorded, so the results must be equal to that step's to the last bit.
        """
        return self._run_step(replace(step, action=Action.REPLAY), spy, in_place=True)

    def score(self, step: Step, *, in_place: bool = False) -> Outcome:
        """Run a step of an engine's samples; ``in_place`` as in ``replay_in_place``."""
        # their token ids repeat, so the spy could not identify rows
        if step.action is Action.REPLAY and not in_place and self.setup.code is ReplayCodeName.CORE:
            for sample in step.samples:
                self._check_routes(sample)
        return self._outcome(step, self._call_ranks(step, in_place=in_place, watch=False))

    def variant(self, name: str) -> MegatronTrainer:
        """See ``ReplaySubject``: a model without MoE layers, or with routers that replay must
        refuse (``megatron_setups.UNSUPPORTED``).
        """
        if name == DENSE:
            return MegatronTrainer(replace(self.setup, dense=True), self._ranks)
        if name in UNSUPPORTED:
            return MegatronTrainer(replace(self.setup, unsupported=name), self._ranks)
        raise UsageError(f"There is no variant {name!r}; there are {[DENSE, *UNSUPPORTED]}.")

    def reference(self, step: Step) -> Outcome:
        """Run the step with ``plain_model``: the undivided model in float64, in this process."""
        if step.action is not Action.REPLAY or not step.backward or self._number < 0:
            raise UnsupportedStep("the reference only trains, on given routes")
        for sample in step.samples:
            self._check_routes(sample)
        nudges = [
            (layer, size * direction((self.setup.num_experts, 32))) for layer, size in self._nudges
        ]
        logprobs, gradients = reference_losses(self.setup, step.samples, self._number, nudges)
        return Outcome(
            step=step.name,
            loss=-sum(float(values.sum()) for values in logprobs.values()),
            logprobs=logprobs,
            gradients={name: sketch(gradient) for name, gradient in gradients.items()},
            gates={layer: sketch(gradients[gate_name(layer)]) for layer in self.setup.moe_layers},
        )

    def residue(self) -> Mapping[str, int]:
        """Count what is left in ``RouterReplay`` of all ranks."""
        left: dict[str, int] = {}
        for answer in self._call_ranks(None):
            for name, number in answer.left.items():
                left[name] = left.get(name, 0) + number
        return left

    def _run_step(self, step: Step, spy: Spy, *, in_place: bool = False) -> Outcome:
        answers = self._call_ranks(step, in_place=in_place)
        for answer in answers:
            spy.extend(answer.events)
        return self._outcome(step, answers)

    def _call_ranks(
        self, step: Step | None, *, in_place: bool = False, watch: bool = True
    ) -> list[Answer]:
        job = Job(
            setup=self.setup,
            episode=self._episode,
            step=step,
            number=self._number,
            nudges=self._nudges,
            in_place=in_place,
            watch=watch,
        )
        try:
            return self._ranks.run(job, world_size=self.setup.world_size, crew=self._crew(step))
        except RankError as error:
            if error.__cause__ is not None:
                raise error.__cause__ from error
            raise

    def _crew(self, step: Step | None) -> Hashable:
        """Return the name of the processes that can run a step."""
        # Megatron makes its groups once, so that processes serve one division, of any model. Other
        # replay code patches megatron-core for good: a step without it gets processes without it
        if self.setup.code is ReplayCodeName.CORE:
            return self.setup.mesh, self.setup.ep
        return self.setup, step is None or step.action is not Action.OFF

    def _check_routes(self, sample: Rollout) -> None:
        """Refuse routes that Megatron would accept silently.

        Raises ``RoutesError``, or ``RouterError`` for a model without routers.
        """
        # RouterReplay checks nothing: for too few rows or columns, or a repeated expert, it makes a
        # routing map with fewer than top_k experts in a row
        setup, routes = self.setup, sample.routes
        if setup.dense:
            raise RouterError(
                "The model has no MoE layers: there is no router that could replay routes. Switch"
                " replay off for this model."
            )
        shape = (sample.total - (setup.rows is Rows.FORWARDED), setup.layout().columns, setup.top_k)
        if routes is not None and setup.rows is Rows.CAPTURED_PREFIX:
            shape = (min(len(routes), sample.total), *shape[1:])
        if routes is None or routes.shape != shape or routes.dtype.kind not in "iu":
            actual = (
                "there are none" if routes is None else f"they are {routes.dtype} {routes.shape}"
            )
            raise RoutesError(
                f"Routes of sample {sample.request_id} must be whole numbers {shape}, (rows,"
                f" layers, top_k); {actual}. Cut a sample and its routes together, and pass what"
                " the engine captured."
            )
        chosen = routes[:, list(self.contract.moe_columns)].astype(np.int64)
        ordered = np.sort(chosen, axis=2)
        if chosen.size and (
            ordered.min() < 0
            or ordered.max() >= setup.num_experts
            or (ordered[:, :, 1:] == ordered[:, :, :-1]).any()
        ):
            raise RoutesError(
                f"A row of the routes of sample {sample.request_id} does not name {setup.top_k}"
                f" distinct experts below {setup.num_experts}: it was never captured, or is padding"
                " (a row of zeros is expert 0, again and again)."
            )

    def _outcome(self, step: Step, answers: Sequence[Answer]) -> Outcome:
        values: dict[tuple[int, int], float] = {}
        for answer in answers:
            values |= {(sample, position): value for sample, position, value in answer.logprobs}
        logprobs = {
            sample.request_id: np.array(
                [
                    values[number, position]
                    for position in range(max(1, len(sample.prompt_ids)), sample.total)
                ]
            )
            for number, sample in enumerate(step.samples)
        }
        gradients = undivided_gradients((answer.rank.tp, answer.gradients) for answer in answers)
        return Outcome(
            step=step.name,
            loss=-sum(values[place] for place in sorted(values)),
            logprobs=logprobs,
            gradients={name: sketch(gradient) for name, gradient in gradients.items()},
            gates={
                layer: sketch(gradients[name])
                for layer in self.setup.moe_layers
                if (name := gate_name(layer)) in gradients
            },
            recorded=self._recorded(step, answers) if step.action is Action.RECORD else {},
        )

    def _recorded(self, step: Step, answers: Sequence[Answer]) -> dict[str, IntArray]:
        """Merge what all ranks recorded to one payload ``(rows, layers, top_k)`` per sample."""
        out: dict[str, IntArray] = {}
        for answer in answers:
            out |= {step.samples[number].request_id: rows for number, rows in answer.merged.items()}
        if out:
            return out
        setup = self.setup
        for dp in range(setup.dp):
            for number, numbered in enumerate(samples_by_microbatch(setup, step, dp)):
                pieces: dict[tuple[Rank, int], dict[int, IntArray]] = {
                    (replace(answer.rank, dp=0), chunk): layers
                    for answer in answers
                    if answer.rank.dp == dp
                    for (microbatch, chunk), layers in answer.recorded.items()
                    if microbatch == number
                }
                samples = [sample for _, sample in numbered]
                lengths = (
                    lengths_of(samples)
                    if setup.own_widths
                    else [sample.total for sample in step.samples]
                )
                payloads = setup.layout(setup.width(lengths)).merge(pieces, lengths_of(samples))
                for sample, rows in zip(samples, payloads, strict=True):
                    if sample is not None:
                        out[sample.request_id] = rows if setup.rows is Rows.ALL else rows[:-1]
        return out
