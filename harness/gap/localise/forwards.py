"""Forwards: a model's run over given tokens, heard module by module, and led on where its outputs
are to be replaced. Needs torch.
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

__all__ = ["Forward", "Visit", "heard", "hf_forward", "megatron_forward", "vllm_forward"]

Visit = Callable[[Site, Any], Any]
"""Called with a site and its values ``(tokens, width)``; what it returns, if anything, stands in
their place from there on.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forward:
    """A model and how it is run over the compared tokens.

    ``run`` is called with ``model`` and runs one forward of ``size`` rows (batch x width with
    padding, or the packed length); ``rows`` ``(tokens,)`` says which row of the flattened
    activations each compared token is, in the order that both sides share: so a sequence-first side
    (Megatron), a packed one and one with padding are told. ``replay`` makes a context in which the
    routers execute given ids ``(size, MoE layers, top_k)``, where that can be done.
    """

    model: Any
    run: Callable[[Any], Any]
    size: int
    rows: IntArray
    name: str
    replay: Callable[[Any, Any], AbstractContextManager[Any]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's parameters: the first that is a matrix, since engines keep norms and
        biases wider.
        """
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
        """The same with a copy of the model in ``dtype``: the arithmetic alone is another."""
        model = copy.deepcopy(self.model).to(dtype)
        if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products of float64 do not exist
        return replace(
            self, model=model, name=f"{self.name} in {str(dtype).removeprefix('torch.')}"
        )


def hf_forward(
    model: Any, input_ids: Any, attention_mask: Any = None, *, name: str = "HF", order: Any = None
) -> Forward:
    """A forward of a causal model of HF transformers over ``input_ids`` ``(batch, width)``.

    Rows that ``attention_mask`` ``(batch, width)`` leaves out are not compared. ``order``
    ``(tokens,)`` is for a batch that holds the tokens of the other side in another order: which of
    this side's filled rows each compared token is. Raises ``GapError``.
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
    where = next(model.parameters()).device
    call = {
        "input_ids": ids.to(where),
        "attention_mask": mask.to(where),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0).to(where),
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
def heard(forward: Forward, visit: Visit) -> Iterator[dict[str, Tap]]:
    """Inside, ``visit`` is called at every site that the model passes with rows of the compared
    tokens; once a site.
    """
    taps = find_taps(forward.model)
    ear = _Ear(forward, visit)
    handles = []
    for tap in taps.values():
        if tap.before is not None:
            handles.append(tap.module.register_forward_pre_hook(ear.before(tap), with_kwargs=True))
        handles.append(tap.module.register_forward_hook(ear.after(tap), with_kwargs=True))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


class _Ear:
    """The hooks of one run."""

    def __init__(self, forward: Forward, visit: Visit) -> None:
        self.size, self.visit = forward.size, visit
        self.rows = torch.from_numpy(np.ascontiguousarray(forward.rows)).to(torch.int64)
        self._done: set[Site] = set()
        self._residual: dict[Site, Any] = {}

    def before(self, tap: Tap) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            given = [item for item in (*args, *kwargs.values()) if _float(item)]
            if not given or tap.before is None:
                return
            # a norm that is fused with the addition gets both terms of it
            whole = (
                given[0] + given[1]
                if len(given) > 1 and given[1].shape == given[0].shape and "norm" in tap.site.role
                else given[0]
            )
            values = self._flat(whole)
            if values is not None and tap.before not in self._done:
                self._done.add(tap.before)
                instead = self.visit(tap.before, values)
                self._residual[tap.site] = instead if instead is not None else values

        return hook

    def after(self, tap: Tap) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            del module, args, kwargs
            if tap.site in self._done:
                return None
            self._done.add(tap.site)
            return self._routed(tap, output) if tap.router else self._plain(tap, output)

        return hook

    def _plain(self, tap: Tap, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        values = self._flat(first) if _float(first) else None
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
        if rest and _float(rest[0]) and rest[0].shape == first.shape and tap.site in self._residual:
            rest = (self._back(rest[0], self._residual[tap.site]), *rest[1:])
        return (led, *rest)

    def _routed(self, tap: Tap, output: Any) -> Any:
        """A router's outputs: logits ``(rows, experts)``; the chosen, as ids ``(rows, top_k)`` or
        as a map; their weights, alike.
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
        chosen = next(
            (i for i, v in enumerate(flat) if v is not None and v.dtype is torch.bool), None
        )
        wide = [i for i, v in enumerate(flat) if v is not None and v.is_floating_point()]
        weights = None
        if ids is not None:
            weights = next((i for i in wide if flat[i].shape == flat[ids].shape), None)
        elif chosen is not None:
            weights = next((i for i in wide if flat[i].shape == flat[chosen].shape), None)
        logits = next((i for i in wide if i != weights), None)
        changed: dict[Any, Any] = {}
        if logits is not None:
            changed[logits] = self.visit(Site(layer=layer, role="router"), flat[logits])
        if weights is not None:
            experts = flat[logits].shape[1] if logits is not None else None
            which, gates = _dense(flat, ids, chosen, weights, experts)
            if which is not None:
                led = self.visit(Site(layer=layer, role="selection"), which)
                own = self.visit(Site(layer=layer, role="gates"), gates)
                if led is not None and own is not None:
                    picked = led if ids is None else _ids_of(led, flat[ids].shape[1])
                    changed[chosen if ids is None else ids] = picked
                    changed[weights] = own if ids is None else own.gather(1, picked)
        if all(value is None for value in changed.values()):
            return None
        for i, value in changed.items():
            if value is not None:
                items[i] = self._back(items[i], value)
        return tuple(items) if isinstance(output, tuple) else items[0]

    def _flat(self, tensor: Any) -> Any:
        """``(tokens, width)`` of the compared tokens; ``None`` where the tensor has other rows."""
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
    flat: list[Any], ids: int | None, chosen: int | None, weights: int, experts: int | None
) -> tuple[Any, Any]:
    """Which experts each token has, ``(tokens, experts)``, and with what weight."""
    if ids is None:
        return (None, None) if chosen is None else (flat[chosen], flat[weights])
    index = flat[ids].to(torch.int64)
    width = experts or int(index.max()) + 1
    gates = torch.zeros((len(index), width), dtype=flat[weights].dtype, device=index.device)
    return torch.zeros_like(gates, dtype=torch.bool).scatter_(1, index, True), gates.scatter_(
        1, index, flat[weights]
    )


def _ids_of(chosen: Any, top_k: int) -> Any:
    """``(tokens, top_k)`` ids of a map; where it has fewer, the last ones are of experts without
    weight.
    """
    return torch.argsort(chosen.to(torch.int8), dim=1, descending=True, stable=True)[:, :top_k]


def _float(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point()


_IN_PROCESS = (
    "the model must live in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is"
    " imported, and make LLM(..., enforce_eager=True, enable_prefix_caching=False)"
)


def megatron_forward(
    model: Any, input_ids: Any, attention_mask: Any = None, *, name: str = "Megatron"
) -> Forward:
    """A forward of a ``GPTModel`` of megatron-core on one rank over ``input_ids`` ``(batch,
    width)``, padded on the right.

    Activations are sequence-first: token s of sample b is row s x batch + b. Where the
    configuration has ``moe_enable_routing_replay``, the routers can be replayed. Raises
    ``GapError`` for padding on the left, which a causal mask alone does not hide.
    """
    ids, mask = _padded(input_ids, attention_mask)
    batch, width = ids.shape
    sample, place = np.nonzero(mask)
    where = next(model.parameters()).device
    tokens = torch.from_numpy(ids).to(where)
    positions = torch.arange(width, device=where)[None].expand(batch, width)
    return Forward(
        model=model,
        run=lambda own: own(tokens, positions, None),
        size=batch * width,
        rows=place * batch + sample,
        name=name,
        replay=_megatron_replay if _replaying_routers(model) else None,
    )


def _replaying_routers(model: Any) -> list[Any]:
    found = [
        module for module in model.modules() if getattr(module, "router_replay", None) is not None
    ]
    return sorted(found, key=lambda router: int(router.layer_number))


@contextmanager
def _megatron_replay(model: Any, routes: Any) -> Iterator[None]:
    """megatron-core's own ``RouterReplay`` with ``routes`` ``(size, MoE layers, top_k)``; a free
    row (-1) gets any distinct experts.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    routers = _replaying_routers(model)
    if len(routers) != routes.shape[1]:
        raise GapError(
            f"The routes have {routes.shape[1]} layers, and the model {len(routers)} routers that"
            " can be replayed."
        )
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
    """A prefill of a ``vllm.LLM`` over ``input_ids`` ``(batch, width)``: its filled tokens lie
    flat, one prompt behind the other.

    Raises ``GapError`` where the model cannot be reached, or where the prefill would take several
    steps.
    """
    ids, mask = _padded(input_ids, attention_mask)
    prompts = [line[: int(own.sum())].tolist() for line, own in zip(ids, mask, strict=True)]
    tokens = sum(map(len, prompts))
    config = llm.llm_engine.vllm_config
    if not config.model_config.enforce_eager or config.cache_config.enable_prefix_caching:
        raise GapError(
            "Modules of this vLLM cannot be heard: compiled graphs call no hooks, and a cached"
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
    """Ids and mask ``(batch, width)`` as arrays, with padding on the right only."""
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
            "Padding must stand on the right: behind padding on the left, tokens would see it."
        )
    return ids, mask
