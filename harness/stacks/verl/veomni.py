"""verl's replay controller for VeOmni (``verl/utils/veomni/router_replay.py``), on a model in plain
PyTorch.

VeOmni's own models call the controller in each router with its scores and its choice, and execute
the result; so does this one. It runs in one process, with one sample in a microbatch, and
recomputes activations layer by layer if a step requests it. The order of calls is that of
``VeOmniEngineWithLMHead`` (verl 0.9.1, workers/engine/veomni/transformer_impl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.events.replay import Action, Outcome, Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.core.replay_contract import Recompute
from rollproof.core.router_spy import Spy, UnsupportedStep, direction, sketch
from rollproof.core.trainer_contract import trainer_contract
from rollproof.replay.megatron.megatron_setups import MegatronSetup
from rollproof.replay.megatron.model_weights import gate_name
from rollproof.replay.megatron.plain_model import PlainModel, reference_losses

__all__ = ["SETUP", "VeOmniTrainer"]

SETUP = MegatronSetup(name="veomni", microbatches=4, microbatch_size=1)
"""The model and the batch of ``VeOmniTrainer``."""


class VeOmniTrainer:
    """A ``ReplaySubject``: verl's controller between the routers' choice and the experts."""

    def __init__(self) -> None:
        from verl.utils.veomni.router_replay import VeOmniRouterReplay

        self.contract: Contract = trainer_contract(
            num_layers=SETUP.num_layers,
            moe_layers=SETUP.moe_layers,
            num_experts=SETUP.num_experts,
            top_k=SETUP.top_k,
            mode="R3",
            free_rows="native",
            vocab=SETUP.vocab,
            recompute=("none", "full"),
            # A row that names an expert twice was never captured: routed natively, on purpose.
            tolerates=("zero-rows",),
            microbatches=SETUP.microbatches,
            microbatch_size=SETUP.microbatch_size,
            parallel="verl VeOmni controller, one process",
        )
        self._controller = VeOmniRouterReplay()
        self._number = 0
        self._nudges: list[tuple[int, FloatArray]] = []

    def run(self, step: Step, spy: Spy) -> Outcome:
        """Run a step: begin, set the targets of each microbatch, clear."""
        model = _HookedModel(SETUP, self._number, self._nudges, self._controller, spy, step)
        logprobs: dict[str, FloatArray] = {}
        if step.action is Action.REPLAY:
            self._controller.begin_replay()
        try:
            for number, samples in enumerate(step.microbatches):
                spy.microbatch = number
                for sample in samples:
                    logprobs[sample.request_id] = self._microbatch(model, sample, step, spy)
        finally:
            self._controller.clear()
        gradients = {
            name: weight.grad.numpy()
            for name, weight in model.weights.items()
            if weight.grad is not None
        }
        return Outcome(
            step=step.name,
            loss=-sum(float(values.sum()) for values in logprobs.values()),
            logprobs=logprobs,
            gradients={name: sketch(gradient) for name, gradient in gradients.items()},
            gates={
                layer: sketch(gradients[name])
                for layer in SETUP.moe_layers
                if (name := gate_name(layer)) in gradients
            },
        )

    def reference(self, step: Step) -> Outcome:
        """Run the same model with the routes as its argument."""
        if step.action is not Action.REPLAY or not step.backward or self._number < 0:
            raise UnsupportedStep("the reference trains on the routes that it is given")
        logprobs, gradients = reference_losses(SETUP, step.samples, self._number, self._nudges)
        return Outcome(
            step=step.name,
            loss=-sum(float(values.sum()) for values in logprobs.values()),
            logprobs=logprobs,
            gradients={name: sketch(gradient) for name, gradient in gradients.items()},
            gates={layer: sketch(gradients[gate_name(layer)]) for layer in SETUP.moe_layers},
        )

    def set_weights(self, number: int) -> None:
        """See ``ReplaySubject``."""
        self._number, self._nudges = number, []

    def nudge(self, layer: int, size: float) -> None:
        """See ``ReplaySubject``."""
        self._nudges.append((layer, size * direction((SETUP.num_experts, 32))))

    def residue(self) -> Mapping[str, int]:
        """Count the targets that are left, and whether the controller still acts."""
        return {
            "targets": self._controller.num_targets,
            "actions": int(self._controller.action.value != "disabled"),
        }

    def _microbatch(self, model: _HookedModel, sample: Rollout, step: Step, spy: Spy) -> FloatArray:
        import torch

        model.tokens = np.array(sample.prompt_ids + sample.response_ids)
        if step.action is Action.REPLAY:
            assert sample.routes is not None
            # The final token has no row. Other missing rows must not be filled: the controller
            # compares shapes.
            final = int(len(sample.routes) == sample.total - 1)
            routes: IntArray = np.pad(sample.routes, ((0, final), (0, 0), (0, 0)))
            by_layer = routes.astype(np.int64).swapaxes(0, 1)
            self._controller.begin_microbatch(
                targets=[torch.from_numpy(rows.copy()) for rows in by_layer]
            )
        with torch.set_grad_enabled(step.backward):
            logprobs = model.logprobs(sample)
        if step.backward and logprobs.numel():
            with spy.recomputing():
                (-logprobs.sum()).backward()
        values: FloatArray = logprobs.detach().numpy()
        return values


class _HookedModel(PlainModel):
    """The plain model with routers that call the controller, and layers that may be recomputed."""

    def __init__(
        self,
        setup: MegatronSetup,
        number: int,
        nudges: list[tuple[int, FloatArray]],
        controller: Any,
        spy: Spy,
        step: Step,
    ) -> None:
        import torch

        super().__init__(setup, number, nudges, final=True)
        if number == -1:
            with torch.no_grad():
                self.weights[gate_name(setup.moe_layers[0])][0, 0] = float("nan")
        self.controller = controller
        self.spy = spy
        self.full = step.recompute is Recompute.FULL
        self.tokens: IntArray = np.zeros(0, dtype=np.int64)
        # the controller tells layers apart by these modules
        self.routers = {layer: torch.nn.Identity() for layer in setup.moe_layers}

    def layer(self, hidden: Any, layer: int, sample: Rollout) -> Any:
        """Run a layer, recomputed in the backward pass if the step requests it."""
        import torch

        if not self.full or not torch.is_grad_enabled():
            return super().layer(hidden, layer, sample)
        return torch.utils.checkpoint.checkpoint(
            super().layer, hidden, layer, sample, use_reentrant=False
        )

    def routes(self, scores: Any, layer: int, sample: Rollout) -> Any:
        """The executed routes: the controller's answer to the router's own choice."""
        chosen = scores.topk(self.setup.top_k, dim=-1).indices
        executed = self.controller.on_router_forward(self.routers[layer], scores, chosen)
        self.spy.routed(layer, executed.numpy(), tokens=self.tokens)
        return executed
