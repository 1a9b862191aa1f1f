"""A replay subject of a tiny model of HF transformers, ``hf_replay`` and plain PyTorch."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rollproof.core.contract import Contract
from rollproof.core.events.replay import Action, Outcome, Purpose, Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.core.replay_contract import FreeRows, Installs, Recompute, ReplayMode
from rollproof.core.router_spy import Spy, UnsupportedStep, direction, sketch
from rollproof.core.trainer_contract import trainer_contract
from rollproof.errors import UsageError
from rollproof.replay.hf.hf_setups import Setup
from rollproof.replay.hf.inputs import Inputs, lay_out
from rollproof.replay.hf.model_families import DENSE, FAMILIES, REFUSED, VOCAB, tiny_model
from rollproof.replay.hf.passes import hf_record, hf_replay
from rollproof.replay.hf.router_formulas import fixed_selection
from rollproof.replay.hf.routers import find_routers
from rollproof.replay.hf.varlen_attention import use_varlen
from rollproof.replay.one_thread import one_thread
from rollproof.replay.router_hooks import last_forward_hook

__all__ = ["HfTrainer", "Replay", "contract_of", "loss_of"]

Replay = Callable[[Any, Any], AbstractContextManager[Any]]
"""Returns a context that replays routes ``(batch, width, layers, top_k)`` or ``(rows, layers,
top_k)`` on a model.
"""

_NOISE = 0.08
_DIGITS = {"float64": 7, "float32": 7, "bfloat16": 2}  # routers compute in float32 at most
_ROUTER = re.compile(r"layers\.(\d+)\.(?:mlp\.gate|mlp\.router)$")


class HfTrainer:
    """A replay subject (``rollproof.core.subjects.ReplaySubject``) around ``tiny_model``.

    Args:
        setup: the configuration of the trainer.
        replay: the replay code under test, by default ``hf_replay``.
        families: the model families that the replay code is for, if it is not for all: then it need
            not refuse routers of others. Raises ``UsageError`` if the setup's is not among them.
    """

    def __init__(
        self,
        setup: Setup | None = None,
        *,
        replay: Replay = hf_replay,
        families: Collection[str] | None = None,
    ) -> None:
        self.setup: Setup = setup or Setup()
        if families is not None and self.setup.family not in families:
            raise UsageError(
                f"The setup's family {self.setup.family!r} is not among those that the replay code"
                f" is for: {sorted(families)}."
            )
        self._families = families
        self.contract: Contract = contract_of(self.setup)
        self.model: Any = self._model()
        self.called: Any = self.model
        """The callable of the training loop: the model, or a wrapper around it."""
        self.scale: int = 1
        """Factor of the loss: the number of processes over which gradients are averaged."""
        self.inputs: Inputs
        self._replay = replay
        if families is not None or replay is not hf_replay:
            self.contract = _declared(
                self.contract, own_families=families is not None, seen=self._installs_seen()
            )
        self._others: dict[str, Any] = {}
        self._first = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }

    def run(self, step: Step, spy: Spy) -> Outcome:
        """Run all microbatches of a step, forward and, if it trains, backward."""
        with one_thread():
            self._prepare(step)
            parts = []
            for number, samples in enumerate(step.microbatches):
                spy.microbatch = number
                if share := self.share(samples):
                    parts.append(self._microbatch(step, lay_out(share, self.setup.layout), spy))
            return self._outcome(step, parts)

    def share(self, samples: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Return the samples of a microbatch that this process runs."""
        return samples

    @one_thread()
    def reference(self, step: Step, world_size: int = 1) -> Outcome:
        """Run the step by the written-out formula of the family, with a fixed selection.

        The router chooses only in rows without a target. Gradients are summed as ``world_size``
        data-parallel processes sum them, so that they can be compared bit by bit.
        """
        own = HfTrainer(self.setup)
        with torch.no_grad():
            for source, parameter in zip(
                self.model.parameters(), own.model.parameters(), strict=True
            ):
                parameter.copy_(source)
        own._replay = partial(_by_formula, own)
        own._prepare(step)
        parts = []
        sums: dict[str, Any] = {}
        for samples in step.microbatches:
            own.model.zero_grad()
            shares = [share for rank in range(world_size) if (share := samples[rank::world_size])]
            parts += [
                own._microbatch(step, lay_out(share, self.setup.layout), Spy(step))
                for share in shares
            ]
            for name, parameter in own.model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = parameter.grad + sums.get(name, 0.0)
        for name, total in sums.items():
            own.model.get_parameter(name).grad = total
        return own._outcome(step, parts)

    def set_weights(self, number: int) -> None:
        """See ``ReplaySubject``."""
        noise = torch.Generator().manual_seed(abs(number))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                added = (
                    _NOISE * torch.randn(parameter.shape, generator=noise)
                    if number > 0
                    else torch.zeros(())
                )
                self.assign(parameter, self._first[name] + added.to(self._first[name].device))
            if number < 0:
                gate = next(iter(self._gates().values()))
                self.assign(
                    gate.weight, torch.full(gate.weight.shape, torch.nan, device=gate.weight.device)
                )

    def nudge(self, layer: int, size: float) -> None:
        """Move the gate weight of ``layer`` along the fixed direction."""
        weight = self._gates()[layer].weight
        with torch.no_grad():
            self.assign(
                weight,
                self.full_value(weight)
                + size * torch.from_numpy(direction(tuple(weight.shape))).to(weight.device),
            )

    def residue(self) -> Mapping[str, int]:
        """Count what replay left on the model, and in the process."""
        # on a GPU autograd's threads may still have a pass that failed
        end = time.monotonic() + (1.0 if self.device != "cpu" else 0.0)
        while any((left := self._left()).values()) and time.monotonic() < end:
            time.sleep(0.01)
        return left

    def _left(self) -> dict[str, int]:
        return {
            "replaced forwards": sum("forward" in vars(module) for module in self.model.modules()),
            "hooks": _hooks(self.model),
            # replay intercepts torch.topk by a function mode, which is state of the thread
            "function modes": len(torch.overrides._get_current_function_mode_stack()),
        }

    def variant(self, name: str) -> HfTrainer:
        """Return the trainer on a model with routers that must be refused."""
        if self._families is not None:
            raise UnsupportedStep(f"the replay code is for {sorted(self._families)} alone")
        family = DENSE if name == "no-moe-layers" else name
        if family not in {DENSE, *REFUSED}:
            raise UnsupportedStep(f"there is no variant {name!r}")
        return HfTrainer(replace(self.setup, family=family), replay=self._replay)

    def assign(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Set a parameter to its full value."""
        parameter.copy_(value)

    def full_value(self, value: torch.Tensor) -> torch.Tensor:
        """Return a parameter or gradient with the parts of all processes."""
        return value

    def _prepare(self, step: Step) -> None:
        self.model.train(step.purpose is Purpose.TRAIN)
        self.model.zero_grad()
        if step.recompute is Recompute.FULL:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": self.setup.reentrant}
            )
        else:
            self.model.gradient_checkpointing_disable()

    def _microbatch(
        self, step: Step, inputs: Inputs, spy: Spy
    ) -> tuple[dict[str, FloatArray], dict[str, IntArray]]:
        """Return logprobs and recorded routes by request."""
        inputs = self.inputs = inputs.on(self.device)
        with ExitStack() as spies:
            spies.enter_context(_single_graph() if self.setup.compiled else nullcontext())
            spies.enter_context(_spied(self.model, spy, inputs))
            other = self._other(step.model)
            if other is not None:
                spies.enter_context(_spied(other, spy, inputs, step.model))
            before = self._marks(self.model)
            with self._context(step, inputs) as entered, torch.set_grad_enabled(step.backward):
                if step.action is Action.REPLAY:
                    for layer in self._installed(self.model, before):
                        spy.installed(layer)
                if other is not None:
                    logprobs = inputs.logprobs(other(**inputs.call).logits)
                    if step.action is Action.REPLAY:  # the context must see a forward
                        self.called(**inputs.call)
                else:
                    logprobs = inputs.logprobs(self.called(**inputs.call).logits)
                loss = -torch.cat(logprobs).sum() * self.scale / _trained(step)
                if step.backward and not self.setup.late:
                    self._backward(loss, spy)
            if step.backward and self.setup.late:
                self._backward(loss, spy)
        by_request = {
            sample.request_id: values.detach().cpu().numpy()
            for sample, values in zip(inputs.samples, logprobs, strict=True)
        }
        return by_request, _recorded(entered, inputs) if step.action is Action.RECORD else {}

    def _outcome(
        self, step: Step, parts: list[tuple[dict[str, FloatArray], dict[str, IntArray]]]
    ) -> Outcome:
        logprobs = {name: values for part, _ in parts for name, values in part.items()}
        return Outcome(
            step=step.name,
            loss=loss_of(step, logprobs),
            logprobs=logprobs,
            recorded={name: routes for _, recorded in parts for name, routes in recorded.items()},
            gradients=self._gradients() if step.backward else {},
            gates=self._gate_gradients() if step.backward else {},
        )

    def _context(self, step: Step, inputs: Inputs) -> AbstractContextManager[Any]:
        if step.action is Action.REPLAY:
            return self._replay(self.model, inputs.routes())
        return hf_record(self.model) if step.action is Action.RECORD else nullcontext()

    @staticmethod
    def _marks(model: nn.Module) -> dict[int, tuple[Any, ...]]:
        """Return what shows on each router that code was installed: its forward and its hooks."""
        return {
            layer: (
                vars(gate).get("forward"),
                *gate._forward_hooks,
                *gate._forward_pre_hooks,
            )
            for layer, gate in _gates(model)
        }

    def _installed(self, model: nn.Module, before: Mapping[int, tuple[Any, ...]]) -> list[int]:
        return [layer for layer, marks in self._marks(model).items() if marks != before[layer]]

    def _installs_seen(self) -> bool:
        """Return whether routers show that the replay code has given them targets.

        Code may work elsewhere, such as in the class of the routers or in ``torch.topk``.
        """
        model = self._model()
        routes = torch.arange(self.contract.top_k or 1).repeat(
            1, 2, self.contract.num_layers or 1, 1
        )
        before = self._marks(model)
        seen = True
        # an exception, so that no context checks at its end that a forward ran
        with suppress(Exception), self._replay(model, routes):
            seen = bool(self._installed(model, before))
            raise UnsupportedStep("only the installation was tried")
        return seen

    def _backward(self, loss: torch.Tensor, spy: Spy) -> None:
        with spy.recomputing():
            loss.backward()

    def _other(self, name: str) -> Any | None:
        if name == "policy":
            return None
        if name not in self._others:
            self._others[name] = self._model(seed=len(name)).eval()
        return self._others[name]

    def _model(self, seed: int = 5) -> Any:
        model = tiny_model(self.setup.family, seed=seed, dtype=getattr(torch, self.setup.dtype)).to(
            self.device
        )
        if self.setup.compiled:
            for layer in model.model.layers:
                # or a step of another shape makes other code, and other sums
                layer.self_attn.compile(dynamic=True)
        return use_varlen(model) if self.setup.varlen else model

    @property
    def device(self) -> str:
        """The device of the model."""
        return self.setup.device

    def _gates(self) -> dict[int, Any]:
        return dict(_gates(self.model))

    def _gradients(self) -> dict[str, FloatArray]:
        return {
            name: sketch(self.full_value(parameter.grad))
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def _gate_gradients(self) -> dict[int, FloatArray]:
        weights = {layer: gate.weight for layer, gate in self._gates().items()}
        return {
            layer: sketch(
                self.full_value(torch.zeros_like(weight) if weight.grad is None else weight.grad)
            )
            for layer, weight in weights.items()
        }


def loss_of(step: Step, logprobs: Mapping[str, FloatArray]) -> float:
    """Return the mean of minus the logprob over the step's response tokens.

    Samples without logprobs are skipped in the sum.
    """
    return -sum(
        float(logprobs[sample.request_id].sum())
        for sample in step.samples
        if sample.request_id in logprobs
    ) / _trained(step)


def _trained(step: Step) -> int:
    return sum(len(sample.response_ids) for sample in step.samples) or 1


def _single_graph() -> AbstractContextManager[Any]:
    """Let torch compile code for any size once."""
    # by default torch treats equal sizes as one, and a first batch as wide as a head as the only
    # width. The next width is other code, which later serves the first one, too, and may sum it to
    # other bits
    patch: Callable[..., AbstractContextManager[Any]] = importlib.import_module(
        "torch.fx.experimental._config"
    ).patch
    return patch(use_duck_shape=False)


@contextmanager
def _by_formula(trainer: HfTrainer, model: Any, routes: Any) -> Iterator[None]:
    """Run the microbatch's forward by formula; a replay finds out what free rows execute."""
    targets = torch.as_tensor(routes).reshape(-1, *routes.shape[-2:]).to(trainer.device)
    executed: dict[int, torch.Tensor] = {}
    routers = find_routers(model)

    def remember(layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        executed[layer] = output[2].clone()

    hooks = [
        router.module.register_forward_hook(partial(remember, router.layer))
        for router in routers.all
    ]
    inputs = trainer.inputs
    with hf_replay(routers, routes), torch.no_grad():
        model(**inputs.call)
    for hook in hooks:
        hook.remove()
    ids = torch.stack([executed[layer] for layer in routers.layers], dim=1)
    own = targets[:, list(routers.layers)] if targets.shape[1] == routers.num_layers else targets
    with fixed_selection(routers, trainer.setup.family, torch.where(own < 0, ids, own)):
        yield


def _gates(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the routers by layer, found by their names in these families."""
    # not by find_routers: what hf_replay uses must not check itself
    for path, module in model.named_modules():
        if (match := _ROUTER.search(path)) and isinstance(
            getattr(module, "weight", None), torch.Tensor
        ):
            yield int(match[1]), module


@contextmanager
def _spied(model: nn.Module, spy: Spy, inputs: Inputs, name: str = "policy") -> Iterator[None]:
    tokens = inputs.tokens

    def report(layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        spy.routed(layer, output[2].detach().cpu().numpy(), tokens=tokens, model=name)

    with ExitStack() as hooks:
        for layer, gate in _gates(model):
            hooks.enter_context(last_forward_hook(gate, partial(report, layer)))
        yield


def _recorded(entered: Any, inputs: Inputs) -> dict[str, IntArray]:
    """Return the recorded routes by request: all layers, without the row of the last token."""
    rows = entered.routes.numpy()
    payload = np.zeros((len(rows), entered.routers.num_layers, rows.shape[2]), dtype=np.int16)
    payload[:, list(entered.layers)] = rows
    return {
        # the last token has no row, as in what engines return
        sample.request_id: payload[inputs.source.sample == number][:-1]
        for number, sample in enumerate(inputs.samples)
    }


def _hooks(model: nn.Module) -> int:
    """Count the forward hooks of rollproof on the model."""
    # transformers adds hooks of its own for checkpointing
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return sum(str(getattr(hook, "__module__", "")).startswith("rollproof.") for hook in hooks)


def _declared(contract: Contract, *, own_families: bool, seen: bool) -> Contract:
    """Return the contract of replay code that shows its installs, and is for its own families."""
    terms = contract.replay
    assert terms is not None
    return replace(
        contract,
        replay=replace(
            terms,
            installs=terms.installs if seen else None,
            unsupported=() if own_families else terms.unsupported,
        ),
    )


def contract_of(setup: Setup) -> Contract:
    """Return the contract of a trainer of this setup."""
    family = {**FAMILIES, **REFUSED}.get(setup.family)
    return trainer_contract(
        num_layers=3,
        moe_layers=family.moe_layers if family else (0,),
        num_experts=family.num_experts if family else 2,
        top_k=family.top_k if family else 1,
        mode=ReplayMode.R3,
        free_rows=FreeRows.NATIVE,
        vocab=VOCAB,
        recompute=(Recompute.NONE, Recompute.FULL),
        records=True,
        installs=Installs.PER_CALL,
        models=("reference",),
        unsupported=tuple(REFUSED),
        float_digits=_DIGITS["bfloat16" if setup.mixed else setup.dtype],
        microbatch_size=setup.samples,
        parallel=setup.parallel,
    )
