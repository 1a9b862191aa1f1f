"""Context managers that replay or record what the routers of a model do in one microbatch.

Routes belong to the *graph* of the forward that ran with them. While a context is open, every call
of a router uses its routes, in the forward pass and in recompute. When the context has closed and a
backward pass reaches the outputs of its forward, its routes are used again until that backward pass
ends. So a recompute (activation checkpointing) selects as its own forward did, whatever was
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
    """Return a context in which every router of ``model`` executes ``routes``.

    Args:
        model: a model of HF transformers (wrapped or not), or the result of ``find_routers``.
        routes: an array or a tensor of any integer type, ``(batch, width, layers, top_k)`` or
            ``(rows, layers, top_k)``, with one row for each row of the flattened input: ``b * width
            + s`` for a batch, and the place in the sequence for a packed one. ``batch_routes`` and
            ``packed_routes`` make it from finished samples. The layer axis has all layers or those
            with a router.
        mask: true for rows that are replayed, such as an attention mask. A row that is masked out
            or all -1 is routed natively: padding, and the last sampled token, for which no engine
            returns a row.

        with hf_replay(model, routes, mask=attention_mask):
            loss = loss_of(model(input_ids, attention_mask=attention_mask))
            loss.backward()

    Run the forward of one microbatch in it, and its backward in it or later. Gradient checkpointing
    (both kinds), DDP and FSDP2 are supported. The weights of the experts are computed from live
    scores, so the routers have gradients. Raises ``RoutesError`` and ``RouterError`` before
    anything runs, ``RouterError`` in the first forward for a router that cannot be replayed, and
    ``ReplayError`` if a router gets other rows, is not called, is called by a second forward, or
    executes other experts. Nothing is left on the model in any case.
    """
    routers = model if isinstance(model, Routers) else find_routers(model)
    return Pass(routers, checked_targets(routes, mask, routers))


def hf_record(model: Any) -> Recorded:
    """Return a context that records the choices of every router of ``model`` (R2).

    Run one forward in it; ``routes`` then has what ``hf_replay`` takes. A recompute in a backward
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
        self._seats: dict[int | None, list[_Seat]] = {}
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
        """Run one call of a router."""
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
        # afterwards: the test has no graph, and a computed weight (LoRA) is cached from its first
        # use to the next
        if router.layer not in self.routers.proven and probe(forward, args, kwargs, **shape):
            self.routers.proven.add(router.layer)
        executed = executed_ids(output, tuple(ids.shape), str(router))
        # as sets: the order of columns has no meaning. The flag is read when the pass ends, because
        # reading it here would wait for the GPU in every layer
        self._wrong.append((executed.sort(-1).values != ids.sort(-1).values).any())
        if not backward:
            self._calls[router.layer] += 1
        return output

    def _twice(self, router: Router) -> str:
        return (
            f"{router} is called a second time in one context, which has the routes of one forward"
            " of one microbatch: the second forward would execute the first one's, without an error"
            " if both have equally many rows. Give every forward a context of its own."
        )

    def _choose(self, router: Router, scores: torch.Tensor, backward: bool) -> torch.Tensor:
        ids = self._ids[router.layer]
        if len(ids) != len(scores):
            raise ReplayError(
                f"{router} is given {len(scores)} rows, and the routes have {len(ids)}: routes need"
                " one row per row of the model's input, batch-major, padding included. Pad, pack"
                " and slice them as the token ids (fill a last token without a row with -1)."
            )
        if ids.device != scores.device:
            ids = self._ids[router.layer] = ids.to(scores.device)
        free = self._free.get(router.layer)
        if free is None:
            return ids
        if backward and self._calls[router.layer] == 1:
            # free rows repeat their forward, too: a near-tie that flips in a recompute would change
            # what was computed (Automodel#3156)
            return self._executed[router.layer]
        chosen = self._executed[router.layer] = torch.where(
            free.to(scores.device), native_choice(scores, self.routers.top_k), ids
        )
        return chosen

    def _settle(self) -> None:
        """Check that every router was called and executed its target."""
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
        if wrong and bool(torch.stack([flag.to(wrong[0].device) for flag in wrong]).any()):
            raise ReplayError(
                "A router returned other experts than its top-k did: what it executed is not what"
                " was replayed."
            )

    def _bind(self, module: Any, args: Any, output: Any) -> None:
        """Tie the routes to the graph of this forward."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._reached)

    def _reached(self, gradient: torch.Tensor) -> None:
        """Use these routes in recomputes, as a backward pass enters the graph of this pass."""
        task = _task()
        seats = [_Seat.of(router) for router in self.routers.all]
        if any(seat.holds(self, task) for seat in seats):
            if not all(seat.active is self for seat in seats):
                raise ReplayError(
                    "The backward passes of two microbatches interleave, so it is uncertain which"
                    " routes a recompute needs: call backward for each microbatch separately."
                )
            return
        if all(seat.active is self for seat in seats):
            return
        self._take(seats, task)
        end = _End(self)
        # autograd calls it when the backward pass ends, and releases it when the pass raises
        weakref.finalize(end, self._leave, task)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _take(self, seats: list[_Seat], task: int | None) -> None:
        self._seats[task] = seats
        for seat in seats:
            seat.push(self, task=task)

    def _leave(self, task: int | None) -> None:
        # the same seats, even if other code has replaced a forward meanwhile
        for seat in self._seats.pop(task, ()):
            seat.drop(self, task=task)


class _End:
    """The end of a backward pass that uses a pass again."""

    def __init__(self, used: Pass) -> None:
        self._used = used

    def __call__(self) -> None:
        self._used._verify()


class Recorded(Pass):
    """Records one microbatch: see ``hf_record``."""

    _unused = (
        "Nothing was recorded, because no router was called: the forward of this model did not run"
        " in the context, or ran in a context within it (a replay executes its routes, so there is"
        " nothing to record)."
    )

    def __init__(self, routers: Routers) -> None:
        super().__init__(routers, None)

    @property
    def layers(self) -> tuple[int, ...]:
        """The global indexes of the layers on the layer axis of ``routes``."""
        return self.routers.layers

    @property
    def routes(self) -> torch.Tensor:
        """The recorded routes, ``(rows, layers with a router, top_k)`` int64.

        Raises ``ReplayError`` before a forward has run.
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
    """Replaces a router's ``forward`` while passes use it; the last pass is active.

    A pass that a backward pass uses again has the number of that backward pass (``task``).
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.passes: list[tuple[Pass, int | None]] = []
        self._instance = vars(router.module).get("forward")
        self._plain = router.module.forward
        # a graph break if a compiled part of a model calls its router: the choice is plain Python
        self._call = torch.compiler.disable(self._run, reason=_UNCOMPILED)

    @classmethod
    def of(cls, router: Router) -> _Seat:
        """Return the seat of a router: the installed one, or a new one."""
        installed = vars(router.module).get("forward")
        return installed if isinstance(installed, _Seat) else cls(router)

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
        """Drop what backward passes of this thread used again, once it is out of all of them."""
        # autograd releases one that raised; on a GPU its own thread does so, perhaps later than
        # backward raises
        if _task() is None:
            for used, task in list(self.passes):
                if task is not None and used.thread == threading.get_ident():
                    self.drop(used, task=task)

    def holds(self, used: Pass, task: int | None) -> bool:
        return (used, task) in self.passes

    def push(self, used: Pass, task: int | None) -> None:
        self.passes.append((used, task))
        # rebound rather than hooked: that composes with the hooks of FSDP2 and with checkpoint
        # wrappers
        self.router.module.forward = self

    def drop(self, used: Pass, task: int | None) -> None:
        with suppress(ValueError):  # not there, or autograd's thread dropped it meanwhile
            self.passes.remove((used, task))
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
    """Return the number of the backward pass that this thread is in; ``None`` outside of any."""
    # as torch.utils.checkpoint finds it
    task = torch._C._current_graph_task_id()
    return None if task == -1 else int(task)


def _refuse_other_thread(routers: Routers) -> None:
    """Refuse a model that replays for another thread, the one that entered a pass."""
    for router in routers.all:
        seat = vars(router.module).get("forward")
        if isinstance(seat, _Seat):
            seat.forget_failed()
            if any(used.thread != threading.get_ident() for used, _ in seat.passes):
                raise ReplayError(
                    f"{router} replays in another thread: one model replays one microbatch at a"
                    " time."
                )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the output of a forward."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
