"""Passes: context managers that replay, or record, what the routers of a model do in one
microbatch.

Routes belong to the *graph* of the forward that was run with them. While a context is open, its
routes are used by every call of a router, be it forward or recompute. When a context has closed and
a backward pass reaches the outputs of its forward, its routes are used again until that backward
pass ends: so a recompute (activation checkpointing) selects as its own forward did, whatever was
installed in between. A recompute that falls back to the router's own choice raises nothing and
gives wrong gradients (verl, Megatron and hooks alike; field reports: SkyRL#1908).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from rollproof.errors import ReplayError
from rollproof.replay.hf.routers import Router, Routers, find_routers
from rollproof.replay.hf.target_routes import Targets, checked_targets
from rollproof.replay.hf.topk import executed_ids, intercepted, native_choice, probe

__all__ = ["Pass", "Recorded", "hf_record", "hf_replay"]


def hf_replay(model: Any, routes: Any, mask: Any = None) -> Pass:
    """A context in which every router of ``model`` executes ``routes`` in place of its own choice.

    ``model`` is a model of HF transformers (wrapped or not), or what ``find_routers`` returned for
    it. ``routes`` is an array or a tensor of any integer type, ``(batch, width, layers, top_k)`` or
    ``(rows, layers, top_k)``: one row for each row of the flattened input, which is ``b * width +
    s`` for a batch, and the place in the packed sequence for a packed one; ``batch_routes`` and
    ``packed_routes`` make it of finished samples. The layer axis holds all layers or those with a
    router. ``mask`` is true where a row is replayed (an attention mask will do); a row that is
    masked out or all -1 is routed natively: padding, and the last sampled token, for which no
    engine returns a row.

        with hf_replay(model, routes, mask=attention_mask):
            loss = loss_of(model(input_ids, attention_mask=attention_mask))
            loss.backward()

    Run the forward of one microbatch in it, and its backward in it or later. Gradient checkpointing
    (both kinds), DDP and FSDP2 compose with it. The weights of the experts are computed from live
    scores, so the routers have gradients. Raises ``RoutesError`` and ``RouterError`` before
    anything runs, ``RouterError`` in the first forward for a router that cannot be replayed, and
    ``ReplayError`` when a router is given other rows, is not reached, is reached by a second
    forward, or executes other experts. Nothing is left on the model, whatever happens.
    """
    routers = model if isinstance(model, Routers) else find_routers(model)
    return Pass(routers, checked_targets(routes, mask, routers))


def hf_record(model: Any) -> Recorded:
    """A context in which what every router of ``model`` chooses is taken down: R2, or the reference
    for another replay.

    Run one forward in it; ``routes`` then holds what ``hf_replay`` takes. A recompute in a backward
    pass repeats what was recorded.
    """
    return Recorded(model if isinstance(model, Routers) else find_routers(model))


class Pass:
    """Replays one microbatch: see ``hf_replay``. A pass is entered once."""

    _unused = (
        "Routes were installed and no router was called: the forward of this model did not run in"
        " the context, or ran in a context within it, or code that was compiled or fused before"
        " does not call the routers."
    )

    def __init__(self, routers: Routers, targets: Targets | None) -> None:
        self.routers: Routers = routers
        self._ids: dict[int, torch.Tensor] = {}
        self._free: dict[int, torch.Tensor] = {}
        self._executed: dict[int, torch.Tensor] = {}
        self._calls: dict[int, int] = dict.fromkeys(routers.layers, 0)
        self._wrong: list[torch.Tensor] = []
        self._held: dict[int | None, list[_Seat]] = {}
        self._entered = False
        self._hook: Any = None
        self.thread: int = threading.get_ident()
        if targets is not None:
            for number, layer in enumerate(routers.layers):
                self._ids[layer] = targets.ids[:, number]
                if targets.any_free:
                    self._free[layer] = targets.free[:, number, None]

    def __enter__(self) -> Self:
        if self._entered:
            raise ReplayError("A pass is entered once: make one for each microbatch.")
        self._entered = True
        self.thread = threading.get_ident()
        _refuse_other_thread(self.routers)
        self._take([_Seat.of(router) for router in self.routers.all], None)
        self._hook = self.routers.owner.register_forward_hook(self._bind)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hook is None:
            raise ReplayError(
                "A pass is left that was not entered: use it as `with hf_replay(model, routes):"
                " ...`."
            )
        self._hook.remove()
        self._leave(None)
        if kind is None:
            self._settle()

    def route(
        self,
        router: Router,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """One call of a router."""
        backward = _task() is not None
        if not backward and self._calls[router.layer]:
            raise ReplayError(self._twice(router))
        shape: dict[str, Any] = {
            "num_experts": self.routers.num_experts,
            "top_k": self.routers.top_k,
            "who": str(router),
        }
        output, ids = intercepted(
            forward,
            args,
            kwargs,
            choose=lambda scores: self._choose(router, scores, backward),
            **shape,
        )
        # Afterwards: the trial has no graph, and a weight that is computed (LoRA) is kept from its
        # first use to the next.
        if router.layer not in self.routers.proven and probe(forward, args, kwargs, **shape):
            self.routers.proven.add(router.layer)
        executed = executed_ids(output, tuple(ids.shape), str(router))
        self._wrong.append((executed.sort(-1).values != ids.sort(-1).values).any())
        if not backward:
            self._calls[router.layer] += 1
        return output

    def _twice(self, router: Router) -> str:
        return (
            f"{router} is called a second time in one context, whose routes are those of one"
            " forward of one microbatch: the second forward would execute the first one's, without"
            " an error where both have as many rows. Give every forward a context of its own."
        )

    def _choose(self, router: Router, scores: torch.Tensor, backward: bool) -> torch.Tensor:
        ids = self._ids[router.layer]
        if len(ids) != len(scores):
            raise ReplayError(
                f"{router} is given {len(scores)} rows, and the routes have {len(ids)}: routes need"
                " one row per row of the model's input, batch-major, padding included. Pad, pack"
                " and slice them as the token ids (a last token without a row is filled by -1)."
            )
        if ids.device != scores.device:
            ids = self._ids[router.layer] = ids.to(scores.device)
        free = self._free.get(router.layer)
        if free is None:
            return ids
        if backward and self._calls[router.layer] == 1:
            # Free rows, too, repeat their forward: a near-tie that flips in a recompute would
            # change what was computed (Automodel#3156).
            return self._executed[router.layer]
        chosen = self._executed[router.layer] = torch.where(
            free.to(scores.device), native_choice(scores, self.routers.top_k), ids
        )
        return chosen

    def _settle(self) -> None:
        """Every router was called, and executed its target."""
        if not any(self._calls.values()):
            raise ReplayError(self._unused)
        if not all(self._calls.values()):
            raise ReplayError(
                f"The routers were not called equally often (layer: calls {self._calls}): some"
                " layers did not run, or run in code that does not call the router (a fused"
                " block), and routed natively."
            )
        self._verify()

    def _verify(self) -> None:
        wrong, self._wrong = self._wrong, []
        if wrong and bool(torch.stack([one.to(wrong[0].device) for one in wrong]).any()):
            raise ReplayError(
                "A router handed on other experts than those that its top-k was given: what it"
                " executed is not what was replayed."
            )

    def _bind(self, module: Any, args: Any, output: Any) -> None:
        """Tie the routes to the graph of this forward."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._reached)

    def _reached(self, gradient: torch.Tensor) -> None:
        """A backward pass enters the graph of this pass: from here its recomputes use these routes."""
        task = _task()
        seats = [_Seat.of(router) for router in self.routers.all]
        if any(seat.holds(self, task) for seat in seats):
            if not all(seat.active is self for seat in seats):
                raise ReplayError(
                    "The backward passes of two microbatches interleave, so that a recompute cannot"
                    " be told whose routes it needs: call backward for each microbatch on its own."
                )
            return
        if all(seat.active is self for seat in seats):
            return
        self._take(seats, task)
        end = _End(self)
        # The engine calls it when the backward pass ends, and lets it go when the pass raises.
        weakref.finalize(end, self._leave, task)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _take(self, seats: list[_Seat], task: int | None) -> None:
        self._held[task] = seats
        for seat in seats:
            seat.push(self, task=task)

    def _leave(self, task: int | None) -> None:
        for seat in self._held.pop(
            task, ()
        ):  # these, also where someone else has put a forward of theirs around one meanwhile
            seat.drop(self, task=task)


class _End:
    """The end of a backward pass that a pass was brought back for."""

    def __init__(self, one: Pass) -> None:
        self._one = one

    def __call__(self) -> None:
        self._one._verify()


class Recorded(Pass):
    """Records one microbatch: see ``hf_record``."""

    _unused = (
        "Nothing was recorded, for no router was called: the forward of this model did not run in"
        " the context, or ran in a context within it (what a replay executes is what it was given:"
        " there is nothing to record)."
    )

    def __init__(self, routers: Routers) -> None:
        super().__init__(routers, None)

    @property
    def layers(self) -> tuple[int, ...]:
        """The global indexes of the layers on the layer axis of ``routes``."""
        return self.routers.layers

    @property
    def routes(self) -> torch.Tensor:
        """``(rows, layers with a router, top_k)`` int64. Raises ``ReplayError`` before a forward
        has run.
        """
        if len(self._ids) < len(self.layers):
            raise ReplayError(
                f"Nothing was recorded in layers {[n for n in self.layers if n not in self._ids]}:"
                " run a forward in the context."
            )
        return torch.stack([self._ids[layer].cpu() for layer in self.layers], dim=1)

    def _twice(self, router: Router) -> str:
        return (
            f"{router} is called a second time while it records: record each microbatch in a"
            " context of its own."
        )

    def _choose(self, router: Router, scores: torch.Tensor, backward: bool) -> torch.Tensor:
        if backward:
            return super()._choose(router, scores, backward)
        chosen = self._ids[router.layer] = native_choice(scores, self.routers.top_k)
        return chosen


_UNCOMPILED = (
    "rollproof replays routes here, in plain Python: compile the model without fullgraph=True, or"
    " only parts without routers, or replay the model as it was before torch.compile"
)


class _Seat:
    """Stands in the place of a router's ``forward`` while a pass holds it; the pass that came last
    is active.

    A pass that a backward pass brought back carries the number of that backward pass (``task``).
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.passes: list[tuple[Pass, int | None]] = []
        self._instance = vars(router.module).get("forward")
        self._plain = router.module.forward
        # A graph break where a compiled part of a model calls its router: the choice is made in
        # plain Python.
        self._call = torch.compiler.disable(self._run, reason=_UNCOMPILED)

    @classmethod
    def of(cls, router: Router) -> _Seat:
        """The seat of a router: the one in place, or a new one that is not in place yet."""
        there = vars(router.module).get("forward")
        return there if isinstance(there, _Seat) else cls(router)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.forget_failed()
        active = self.active
        return (
            self._plain(*args, **kwargs)
            if active is None
            else active.route(self.router, self._plain, args, kwargs)
        )

    @property
    def active(self) -> Pass | None:
        return self.passes[-1][0] if self.passes else None

    def forget_failed(self) -> None:
        """Drop what backward passes of this thread brought back, when it is out of all of them:
        they are over.

        One that raised is let go by autograd; on a GPU by a thread of autograd's own, which may be
        later than ``backward`` raises.
        """
        if _task() is None:
            for one, task in list(self.passes):
                if task is not None and one.thread == threading.get_ident():
                    self.drop(one, task=task)

    def holds(self, one: Pass, task: int | None) -> bool:
        return (one, task) in self.passes

    def push(self, one: Pass, task: int | None) -> None:
        self.passes.append((one, task))
        self.router.module.forward = self

    def drop(self, one: Pass, task: int | None) -> None:
        with suppress(ValueError):  # not there, or dropped by autograd's thread meanwhile
            self.passes.remove((one, task))
        if self.passes or vars(self.router.module).get("forward") is not self:
            return
        if self._instance is None:
            del self.router.module.forward
        else:
            self.router.module.forward = self._instance

    def __deepcopy__(self, memo: Any) -> _Seat:
        raise ReplayError(
            "The model is copied while it replays: the copy would replay, too. Copy it outside of"
            " the context."
        )

    def __reduce__(self) -> Any:
        raise ReplayError(
            "The model is pickled while it replays. Save or send it outside of the context."
        )


def _task() -> int | None:
    """The number of the backward pass that this thread is in; ``None`` outside of any
    (torch.utils.checkpoint asks the same way).
    """
    task = torch._C._current_graph_task_id()
    return None if task == -1 else int(task)


def _refuse_other_thread(routers: Routers) -> None:
    """Refuse a model that replays for another thread: for one that entered a pass, whichever thread
    runs its backward pass.
    """
    for router in routers.all:
        seat = vars(router.module).get("forward")
        if isinstance(seat, _Seat):
            seat.forget_failed()
            if any(one.thread != threading.get_ident() for one, _ in seat.passes):
                raise ReplayError(
                    f"{router} replays in another thread: one model replays one microbatch at a"
                    " time."
                )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a forward returned."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
