"""Subject: a Megatron trainer with routing replay as rollproof judges it, on as many CPU processes
as its setup needs.
"""

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
    ReplayCodeName,
    Setup,
    setup_named,
)
from rollproof.replay.megatron.microbatches import dealt, lengths_of
from rollproof.replay.megatron.model_weights import gate_name, whole_gradients
from rollproof.replay.megatron.plain_model import reference_losses
from rollproof.replay.megatron.rank_worker import Answer, Job, worker
from rollproof.replay.plans import DENSE
from rollproof.replay.process_group import RankError, Ranks

__all__ = ["MegatronTrainer", "megatron_ranks"]

_EPISODES = count()


_IMPORTED: Mapping[ReplayCodeName, tuple[str, ...]] = {
    ReplayCodeName.VERL: ("verl.utils.megatron.router_replay_utils",)
}
"""What other people's code takes seconds to import; importing it patches nothing of megatron-core."""


def megatron_ranks(
    limit_s: float = 120.0, *, cuda: bool = False, code: ReplayCodeName = ReplayCodeName.CORE
) -> Ranks:
    """Processes for Megatron trainers, with ``cuda`` on a GPU each: import megatron-core once, and
    fork. Close them when done.

    Those for another ``code`` import that, too; any setup runs on any of them.
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
    """A ``ReplaySubject`` on megatron-core. ``ranks`` may be shared by many trainers, one running
    at a time.
    """

    def __init__(self, setup: Setup | str, ranks: Ranks) -> None:
        self.setup: Setup = setup_named(setup) if isinstance(setup, str) else setup
        self.contract: Contract = self.setup.contract()
        self._ranks = ranks
        self._episode = f"episode {next(_EPISODES)}"
        self._number = 0
        self._nudges: tuple[tuple[int, float], ...] = ()

    def run(self, step: Step, spy: Spy) -> Outcome:
        """One step on all ranks. Raises what a rank raised, where that can be told from its end;
        else ``RankError``.
        """
        if step.action is Action.REPLAY and self.setup.code is ReplayCodeName.CORE:
            for sample in step.samples:
                self._checked(sample)
        return self._ran(step, spy)

    def set_weights(self, number: int) -> None:
        """See ``ReplaySubject``; weights are a function of ``number`` and a parameter's name,
        whatever the setup.
        """
        self._number, self._nudges = number, ()

    def nudge(self, layer: int, size: float) -> None:
        """See ``ReplaySubject``."""
        self._nudges = (*self._nudges, (layer, size))

    def replay_in_place(self, step: Step, spy: Spy) -> Outcome:
        """Replay what each rank recorded in its last recording step, row by row as it stands,
        padding too.

        The samples must be those of that step; their routes are not used. Every row executes what
        it recorded, so that nothing may differ from that step, not even in the last bit.
        """
        return self._ran(replace(step, action=Action.REPLAY), spy, in_place=True)

    def score(self, step: Step, *, in_place: bool = False) -> Outcome:
        """A step of samples as an engine sampled them, whose token ids repeat: routers are not
        watched.

        ``in_place`` as in ``replay_in_place``.
        """
        if step.action is Action.REPLAY and not in_place and self.setup.code is ReplayCodeName.CORE:
            for sample in step.samples:
                self._checked(sample)
        return self._outcome(step, self._asked(step, in_place=in_place, watch=False))

    def variant(self, name: str) -> MegatronTrainer:
        """See ``ReplaySubject``: a model without MoE layers, or with routers that replay must
        refuse (``setups.UNSUPPORTED``).
        """
        if name == DENSE:
            return MegatronTrainer(replace(self.setup, dense=True), self._ranks)
        if name in UNSUPPORTED:
            return MegatronTrainer(replace(self.setup, unsupported=name), self._ranks)
        raise UsageError(f"There is no variant {name!r}; there are {[DENSE, *UNSUPPORTED]}.")

    def reference(self, step: Step) -> Outcome:
        """The step by ``plain``: the undivided model in float64, in this process."""
        if step.action is not Action.REPLAY or not step.backward or self._number < 0:
            raise UnsupportedStep("the reference trains on the routes that it is given")
        for sample in step.samples:
            self._checked(sample)
        nudges = [
            (layer, size * direction((self.setup.num_experts, 32))) for layer, size in self._nudges
        ]
        logprobs, gradients = reference_losses(self.setup, step.samples, self._number, nudges)
        return Outcome(
            step=step.name,
            loss=-sum(float(one.sum()) for one in logprobs.values()),
            logprobs=logprobs,
            gradients={name: sketch(gradient) for name, gradient in gradients.items()},
            gates={layer: sketch(gradients[gate_name(layer)]) for layer in self.setup.moe_layers},
        )

    def residue(self) -> Mapping[str, int]:
        """What is left in ``RouterReplay`` of all ranks; after a failure that ended the ranks,
        nothing is.
        """
        left: dict[str, int] = {}
        for answer in self._asked(None):
            for name, number in answer.left.items():
                left[name] = left.get(name, 0) + number
        return left

    def _ran(self, step: Step, spy: Spy, *, in_place: bool = False) -> Outcome:
        answers = self._asked(step, in_place=in_place)
        for answer in answers:
            spy.extend(answer.events)
        return self._outcome(step, answers)

    def _asked(
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
        """Megatron makes its groups once, so that processes serve one division, of any model.

        Other people's code patches megatron-core for good: a step without it gets processes that
        never saw it.
        """
        if self.setup.code is ReplayCodeName.CORE:
            return self.setup.mesh, self.setup.ep
        return self.setup, step is None or step.action is not Action.OFF

    def _checked(self, sample: Rollout) -> None:
        """Refuse routes that Megatron would take in silence. Raises ``RoutesError``, or
        ``RouterError`` where no router could replay any.

        ``RouterReplay`` looks at nothing: of too few rows or columns, or an expert named twice, it
        makes a routing map with fewer than top_k experts in a row.
        """
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
            found = (
                "there are none" if routes is None else f"they are {routes.dtype} {routes.shape}"
            )
            raise RoutesError(
                f"Routes of sample {sample.request_id} must be whole numbers {shape}, (rows,"
                f" layers, top_k); {found}. Cut a sample and its routes together, and hand over"
                " what the engine captured."
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
            one.request_id: np.array(
                [
                    values[number, position]
                    for position in range(max(1, len(one.prompt_ids)), one.total)
                ]
            )
            for number, one in enumerate(step.samples)
        }
        gradients = whole_gradients((answer.rank.tp, answer.gradients) for answer in answers)
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
        """What all ranks recorded, merged to one payload ``(rows, layers, top_k)`` per sample, of
        as many rows as the setup declares.
        """
        out: dict[str, IntArray] = {}
        for answer in answers:
            out |= {step.samples[number].request_id: rows for number, rows in answer.handed.items()}
        if out:
            return out
        setup = self.setup
        for dp in range(setup.dp):
            for number, mine in enumerate(dealt(setup, step, dp)):
                pieces: dict[tuple[Rank, int], dict[int, IntArray]] = {
                    (replace(answer.rank, dp=0), chunk): layers
                    for answer in answers
                    if answer.rank.dp == dp
                    for (microbatch, chunk), layers in answer.recorded.items()
                    if microbatch == number
                }
                samples = [sample for _, sample in mine]
                lengths = (
                    lengths_of(samples) if setup.own_widths else [one.total for one in step.samples]
                )
                whole = setup.layout(setup.width(lengths)).merge(pieces, lengths_of(samples))
                for one, rows in zip(samples, whole, strict=True):
                    if one is not None:
                        out[one.request_id] = rows if self.setup.rows is Rows.ALL else rows[:-1]
        return out
