"""A model's forward over given tokens, with a hook at every site that may replace its output.

For models of HF transformers, of megatron-core and of vLLM. Needs torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rollproof.core.records import IntArray
from rollproof.errors import GapError
from rollproof.gap.localise.sites import Site, Tap, find_taps

__all__ = ["Forward", "Visit", "hf_forward", "megatron_forward", "visit_sites", "vllm_forward"]

Visit = Callable[[Site, Any], Any]
"""Called with a site and its values ``(tokens, width)``; a result replaces them from there on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forward:
    """A model and how it is run over the compared tokens.

    Attributes:
        model: the model.
        run: called with ``model``, runs one forward.
        size: rows of that forward (batch x width with padding, or the packed length).
        rows: ``(tokens,)``: the row of the flattened activations of each compared token, in the
            order that both sides share. That describes a sequence-first side (Megatron), a packed
            one and one with padding.
        name: the name of the side.
        replay: makes a context in which the routers execute given ids
            ``(size, MoE layers, top_k)``, if that is possible.
    """

    model: Any
    run: Callable[[Any], Any]
    size: int
    rows: IntArray
    name: str
    replay: Callable[[Any, Any], AbstractContextManager[Any]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's first matrix; engines store norms and biases wider."""
        kinds = [
            parameter.dtype
            for parameter in self.model.parameters()
            if parameter.is_floating_point() and parameter.ndim > 1
        ]
        if not kinds:
            raise GapError(
                f"{self.name} has no parameters: localisation compares the modules of two models."
            )
        return kinds[0]

    def recast(self, dtype: torch.dtype) -> Forward:
        """Return the forward with a copy of the model in ``dtype``."""
        model = copy.deepcopy(self.model).to(dtype)
        if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products of float64 do not exist
        return replace(
            self, model=model, name=f"{self.name} in {str(dtype).removeprefix('torch.')}"
        )


def hf_forward(
    model: Any, input_ids: Any, attention_mask: Any = None, *, name: str = "HF", order: Any = None
) -> Forward:
    """Return a forward of a causal model of HF transformers.

    Args:
        model: the model.
        input_ids: ``(batch, width)``.
        attention_mask: ``(batch, width)``: rows that it leaves out are not compared.
        name: the name of the side.
        order: ``(tokens,)``, for a batch with the tokens in another order than the other side's:
            the filled row of each compared token.

    Raises:
        GapError: shapes that do not fit.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim != 2:
        raise GapError(f"input_ids must be (batch, width), not {tuple(ids.shape)}.")
    mask = (
        torch.ones_like(ids)
        if attention_mask is None
        else torch.as_tensor(attention_mask).to(torch.int64)
    )
    if mask.shape != ids.shape:
        raise GapError(
            f"attention_mask {tuple(mask.shape)} and input_ids {tuple(ids.shape)} must have one"
            " shape."
        )
    filled = np.flatnonzero(mask.numpy().reshape(-1))
    rows = filled if order is None else filled[np.asarray(order)]
    device = next(model.parameters()).device
    call = {
        "input_ids": ids.to(device),
        "attention_mask": mask.to(device),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0).to(device),
        "use_cache": False,
    }
    return Forward(
        model=model,
        run=lambda own: own(**call),
        size=ids.numel(),
        rows=rows,
        name=name,
        replay=_hf_replay,
    )


def _hf_replay(model: Any, routes: Any) -> AbstractContextManager[Any]:
    from rollproof.replay.hf import hf_replay

    return hf_replay(model, routes)


@contextmanager
def visit_sites(forward: Forward, visit: Visit) -> Iterator[dict[str, Tap]]:
    """While the context is open, call ``visit`` once at every site that the model passes."""
    taps = find_taps(forward.model)
    hooks = _Hooks(forward, visit)
    handles = []
    for tap in taps.values():
        if tap.before is not None:
            handles.append(
                tap.module.register_forward_pre_hook(hooks.before(tap), with_kwargs=True)
            )
        handles.append(tap.module.register_forward_hook(hooks.after(tap), with_kwargs=True))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


class _Hooks:
    """The hooks of one run."""

    def __init__(self, forward: Forward, visit: Visit) -> None:
        self.size, self.visit = forward.size, visit
        self.rows = torch.from_numpy(np.ascontiguousarray(forward.rows)).to(torch.int64)
        self._done: set[Site] = set()
        self._residual: dict[Site, Any] = {}

    def before(self, tap: Tap) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            inputs = [item for item in (*args, *kwargs.values()) if _is_float(item)]
            if not inputs or tap.before is None:
                return
            total = inputs[0]
            if len(inputs) > 1 and inputs[1].shape == total.shape and "norm" in tap.site.role:
                # a norm that is fused with the addition gets both terms of it
                total = total + inputs[1]
            values = self._flat(total)
            if values is not None and tap.before not in self._done:
                self._done.add(tap.before)
                # a pre-hook cannot replace the sum that a fused norm computes: its output is
                # replaced instead
                instead = self.visit(tap.before, values)
                self._residual[tap.site] = instead if instead is not None else values

        return hook

    def after(self, tap: Tap) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            del module, args, kwargs
            # an engine may run further steps: only the first run of a module is compared
            if tap.site in self._done:
                return None
            self._done.add(tap.site)
            return self._routed(tap, output) if tap.router else self._plain(tap, output)

        return hook

    def _plain(self, tap: Tap, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        values = self._flat(first) if _is_float(first) else None
        if values is None:
            return None
        changed = None
        for site, columns in tap.columns.items():
            index = slice(None) if columns is None else torch.from_numpy(columns).to(values.device)
            instead = self.visit(site, values[:, index])
            if instead is not None:
                changed = values.clone() if changed is None else changed
                changed[:, index] = instead.to(changed)
        if changed is None:
            return None
        led = self._back(first, changed)
        if not isinstance(output, tuple):
            return led
        rest = output[1:]
        if (
            rest
            and _is_float(rest[0])
            and rest[0].shape == first.shape
            and tap.site in self._residual
        ):
            rest = (self._back(rest[0], self._residual[tap.site]), *rest[1:])
        return (led, *rest)

    def _routed(self, tap: Tap, output: Any) -> Any:
        """Visit the outputs of a router.

        They are logits ``(rows, experts)``; the selected experts, as ids ``(rows, top_k)`` or as a
        map; and their weights, in the same form.
        """
        items = list(output) if isinstance(output, tuple) else [output]
        layer = tap.site.layer
        flat: list[Any] = [
            self._flat(item) if isinstance(item, torch.Tensor) else None for item in items
        ]
        ids = next(
            (
                i
                for i, v in enumerate(flat)
                if v is not None and v.dtype in (torch.int32, torch.int64)
            ),
            None,
        )
        selected = next(
            (i for i, v in enumerate(flat) if v is not None and v.dtype is torch.bool), None
        )
        wide = [i for i, v in enumerate(flat) if v is not None and v.is_floating_point()]
        weights = None
        if ids is not None:
            weights = next((i for i in wide if flat[i].shape == flat[ids].shape), None)
        elif selected is not None:
            weights = next((i for i in wide if flat[i].shape == flat[selected].shape), None)
        logits = next((i for i in wide if i != weights), None)
        changed: dict[Any, Any] = {}
        if logits is not None:
            changed[logits] = self.visit(Site(layer=layer, role="router"), flat[logits])
        if weights is not None:
            experts = flat[logits].shape[1] if logits is not None else None
            selection, gates = _dense(flat, ids, selected, weights, experts)
            if selection is not None:
                led = self.visit(Site(layer=layer, role="selection"), selection)
                own = self.visit(Site(layer=layer, role="gates"), gates)
                if led is not None and own is not None:
                    picked = led if ids is None else _ids_of(led, flat[ids].shape[1])
                    changed[selected if ids is None else ids] = picked
                    changed[weights] = own if ids is None else own.gather(1, picked)
        if all(value is None for value in changed.values()):
            return None
        for i, value in changed.items():
            if value is not None:
                items[i] = self._back(items[i], value)
        return tuple(items) if isinstance(output, tuple) else items[0]

    def _flat(self, tensor: Any) -> Any:
        """``(tokens, width)`` of the compared tokens; ``None`` if the tensor has other rows."""
        if tensor.ndim == 0 or tensor.numel() % self.size:
            return None
        rows = 1
        for length in tensor.shape[:-1]:
            rows *= length
            if rows == self.size:
                return tensor.detach().reshape(self.size, -1)[self.rows.to(tensor.device)]
        return None

    def _back(self, tensor: Any, values: Any) -> Any:
        out = tensor.clone().reshape(self.size, -1)
        out[self.rows.to(out.device)] = values.to(device=out.device, dtype=out.dtype)
        return out.reshape(tensor.shape)


def _dense(
    flat: list[Any], ids: int | None, selected: int | None, weights: int, experts: int | None
) -> tuple[Any, Any]:
    """Return the experts of each token, ``(tokens, experts)``, and their weights."""
    if ids is None:
        return (None, None) if selected is None else (flat[selected], flat[weights])
    index = flat[ids].to(torch.int64)
    width = experts or int(index.max()) + 1
    gates = torch.zeros((len(index), width), dtype=flat[weights].dtype, device=index.device)
    return torch.zeros_like(gates, dtype=torch.bool).scatter_(1, index, True), gates.scatter_(
        1, index, flat[weights]
    )


def _ids_of(selection: Any, top_k: int) -> Any:
    """``(tokens, top_k)`` ids of a map; if it has fewer, the last ones have no weight."""
    return torch.argsort(selection.to(torch.int8), dim=1, descending=True, stable=True)[:, :top_k]


def _is_float(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point()


_IN_PROCESS = (
    "the model must live in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is"
    " imported, and make LLM(..., enforce_eager=True, enable_prefix_caching=False)"
)


def megatron_forward(
    model: Any, input_ids: Any, attention_mask: Any = None, *, name: str = "Megatron"
) -> Forward:
    """Return a forward of a ``GPTModel`` of megatron-core on one rank.

    ``input_ids`` ``(batch, width)`` is padded on the right. Activations are sequence-first: token s
    of sample b is row s x batch + b. With ``moe_enable_routing_replay`` in the configuration, the
    routers can be replayed. Raises ``GapError`` for padding on the left, which a causal mask alone
    does not hide.
    """
    ids, mask = _padded(input_ids, attention_mask)
    batch, width = ids.shape
    sample, place = np.nonzero(mask)
    device = next(model.parameters()).device
    tokens = torch.from_numpy(ids).to(device)
    positions = torch.arange(width, device=device)[None].expand(batch, width)
    return Forward(
        model=model,
        run=lambda own: own(tokens, positions, None),
        size=batch * width,
        rows=place * batch + sample,
        name=name,
        replay=_megatron_replay if _replaying_routers(model) else None,
    )


def _replaying_routers(model: Any) -> list[Any]:
    routers = [
        module for module in model.modules() if getattr(module, "router_replay", None) is not None
    ]
    return sorted(routers, key=lambda router: int(router.layer_number))


@contextmanager
def _megatron_replay(model: Any, routes: Any) -> Iterator[None]:
    """Replay ``routes`` ``(size, MoE layers, top_k)`` with megatron-core's ``RouterReplay``."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    routers = _replaying_routers(model)
    if len(routers) != routes.shape[1]:
        raise GapError(
            f"The routes have {routes.shape[1]} layers, and the model {len(routers)} routers that"
            " can be replayed."
        )
    # a free row (-1) gets any distinct experts
    filler = torch.arange(routes.shape[2])
    try:
        for router, target in zip(routers, routes.unbind(1), strict=True):
            target = torch.where(target < 0, filler, target).to(router.weight.device)
            router.router_replay.set_target_indices(target)
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
    finally:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


def vllm_forward(
    llm: Any, input_ids: Any, attention_mask: Any = None, *, name: str = "vLLM"
) -> Forward:
    """Return a prefill of a ``vllm.LLM`` over ``input_ids`` ``(batch, width)``.

    Its filled tokens are flat, one prompt after the other. Raises ``GapError`` if the model cannot
    be reached, or the prefill would take several steps.
    """
    ids, mask = _padded(input_ids, attention_mask)
    prompts = [line[: int(own.sum())].tolist() for line, own in zip(ids, mask, strict=True)]
    tokens = sum(map(len, prompts))
    config = llm.llm_engine.vllm_config
    if not config.model_config.enforce_eager or config.cache_config.enable_prefix_caching:
        raise GapError(
            "Modules of this vLLM cannot be observed: compiled graphs call no hooks, and a cached"
            f" prefix is not run; {_IN_PROCESS}."
        )
    room = (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs)
    if tokens > room[0] or len(prompts) > room[1]:
        raise GapError(
            f"{tokens:,} tokens of {len(prompts)} prompts do not fit into one step of vLLM"
            f" ({room[0]:,} tokens of {room[1]} prompts): give fewer, or raise"
            " max_num_batched_tokens and max_num_seqs."
        )
    try:
        model = llm.apply_model(_itself)[0]
    except Exception as error:
        raise GapError(
            f"The model of this vLLM cannot be reached ({type(error).__name__}); {_IN_PROCESS}."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise GapError(f"The model of this vLLM cannot be reached; {_IN_PROCESS}.")

    def run(_: Any) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return Forward(model=model, run=run, size=tokens, rows=np.arange(tokens), name=name)


def _itself(model: Any) -> Any:
    return model


def _padded(input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    """Return ids and mask ``(batch, width)`` as arrays, with padding on the right only."""
    ids = np.asarray(input_ids, dtype=np.int64)
    if ids.ndim != 2:
        raise GapError(f"input_ids must be (batch, width), not {ids.shape}.")
    mask = (
        np.ones(ids.shape, bool)
        if attention_mask is None
        else np.asarray(attention_mask).astype(bool)
    )
    if mask.shape != ids.shape:
        raise GapError(
            f"attention_mask {mask.shape} and input_ids {ids.shape} must have one shape."
        )
    if (np.diff(mask.astype(np.int8), axis=1) > 0).any():
        raise GapError(
            "Padding must be on the right: tokens after padding on the left would attend to it."
        )
    return ids, mask
