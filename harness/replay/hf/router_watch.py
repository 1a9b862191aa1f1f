"""Report to a spy what the routers of a model of HF transformers execute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from rollproof.core.router_spy import Spy
from rollproof.replay.hf.routers import Routers
from rollproof.replay.hf.topk import executed_ids
from rollproof.replay.router_hooks import last_forward_hook

__all__ = ["watched"]


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
