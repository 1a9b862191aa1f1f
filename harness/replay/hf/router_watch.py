"""Report to a spy what the routers of a model of HF transformers execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from rollproof.core.router_spy import Spy
from rollproof.replay.hf.routers import Routers
from rollproof.replay.hf.topk import executed_ids

__all__ = ["last_forward_hook", "watched"]


@contextmanager
def watched(routers: Routers, spy: Spy, tokens: Any, *, model: str = "policy") -> Iterator[None]:
    """Report every call of a router to ``spy``, in the forward pass and in recompute.

    What is reported is the router's output after every other forward hook on it, also one that is
    registered later: replay code may execute its targets in a hook. ``tokens`` are the input tokens
    of the rows that the routers see, flattened or not, -1 in padding (or any id that no sample
    has). ``model`` is the name of the model that runs, as in ``Step``.
    """
    rows = tokens.detach().cpu().numpy().ravel()

    def report(router: Any, _module: Any, _inputs: Any, output: Any) -> None:
        ids = executed_ids(output, (len(rows), routers.top_k), str(router))
        spy.routed(router.layer, ids.detach().cpu().numpy(), tokens=rows, model=model)

    with ExitStack() as hooks:
        for router in routers.all:
            hooks.enter_context(last_forward_hook(router.module, partial(report, router)))
        yield


@contextmanager
def last_forward_hook(module: nn.Module, hook: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Call ``hook(module, inputs, output)`` after every other forward hook of ``module``."""
    # torch calls hooks in the order of their registration, and code under test registers its own
    # after an observer (SkyRL#1772 replaces the router's output in a hook)
    handle = module.register_forward_hook(hook)

    def move_to_end(_module: nn.Module, _inputs: Any) -> None:
        module._forward_hooks.move_to_end(handle.id)

    before = module.register_forward_pre_hook(move_to_end)
    try:
        yield
    finally:
        before.remove()
        handle.remove()
