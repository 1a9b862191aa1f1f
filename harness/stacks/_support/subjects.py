"""What the subjects of several stacks have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    Provenance,
    ResumeBy,
    Rows,
    Sampling,
    Versions,
)
from rollproof.core.events.rollout import Observation
from rollproof.core.records import Request
from rollproof.fakes.engine.exceptions import EngineFailure

if TYPE_CHECKING:
    from rollproof.core.records import EngineOutput
    from rollproof.fakes.engine.fleet import Fleet

__all__ = [
    "ROOM",
    "StackOutput",
    "StackSubject",
    "budget_of",
    "client_contract",
    "load_on_every_engine",
    "record_turn",
    "sglang_meta_info",
    "token_logprobs",
    "wants_routes",
]

ROOM = 1024
"""Response length, in tokens, of requests that state no limit: more than any case samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackOutput:
    """What a stack returned for a request, in a type of its own."""

    request: Request
    output: Any


class StackSubject:
    """Base of the rollout subjects: nothing to stop."""

    contract: Contract

    def stop(self) -> Awaitable[None] | None:
        """Free nothing: the fleet ends with the case."""
        return None


def client_contract(
    fleet: Fleet, *, rows: Rows, resume: ResumeBy, versions: Versions, **differs: Any
) -> Contract:
    """Return the contract of a stack's client over ``fleet``.

    Most clients resume aborted calls out of sight, have sampling parameters of their own, and lose
    the KV cache of what they resume; logprobs are the engine's. Routes, if ``rows`` says that a
    sample has any, cover all layers, in the flavour's dtype, as they were sampled. ``differs`` are
    the fields of ``Contract`` that are not so.
    """
    fields: dict[str, Any] = {
        "logprobs": fleet.flavour.logprobs,
        "abort_surfaces": False,
        "sampling": Sampling.OWN,
        "kv_policy": KvPolicy.RECOMPUTE,
    }
    if rows is not Rows.NONE:
        model = fleet.case.model
        # A contract without rows must not describe them.
        fields |= {
            **model.sizes,
            "layer_axis": LayerAxis.ALL,
            "filler": Filler.NONE,
            "dtype": fleet.flavour.dtype(model.num_experts).name,
            "provenance": Provenance.AS_SAMPLED,
        }
    return Contract(rows=rows, resume=resume, versions=versions, **{**fields, **differs})


def budget_of(request: Request) -> int:
    """The request's budget in tokens; ``ROOM`` if it states none."""
    return ROOM if request.budget is None else request.budget


def wants_routes(fleet: Fleet) -> bool:
    """Whether any request of the case wants routes: stacks configure them for all calls at once."""
    return any(request.want_routes for request in fleet.case.requests)


def record_turn(fleet: Fleet, request: Request, turn: tuple[int, ...]) -> None:
    """Record the tokens that the environment adds to a conversation."""
    fleet.recorder.record(Observation(request_id=request.request_id, token_ids=turn))


def load_on_every_engine(fleet: Fleet, label: int | None) -> None:
    """Load the weights published under ``label`` on every engine, in a transfer that blocks the
    loop of the stack.

    Engines are processes of their own: those that are not paused go on sampling, and one that fails
    does not stop the others.

    Raises:
        EngineFailure: What the first engine raised, after all had their turn.
    """
    failures: list[EngineFailure] = []
    version = fleet.weights_of(label)
    for engine in fleet.servers.values():
        engine.run_while_blocked()
    for engine in fleet.servers.values():
        try:
            engine.load_now(version, label, identity=version == engine.version)
        except EngineFailure as error:
            failures.append(error)
    if failures:
        raise failures[0]


def sglang_meta_info(output: EngineOutput) -> dict[str, Any]:
    """``meta_info`` of a reply of SGLang's in-process engine, without routes."""
    meta: dict[str, Any] = {"finish_reason": {"type": str(output.finish_reason)}}
    if output.logprobs is not None:
        meta["output_token_logprobs"] = [
            (float(logprob), token, None)
            for logprob, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
    return meta


def token_logprobs(output: EngineOutput) -> list[Mapping[int, Any]]:
    """``logprobs`` of vLLM's ``CompletionOutput``: a mapping for each sampled token."""
    from types import SimpleNamespace

    values = [] if output.logprobs is None else output.logprobs.tolist()
    return [
        {token: SimpleNamespace(logprob=value)}
        for token, value in zip(output.token_ids, values, strict=False)
    ]
