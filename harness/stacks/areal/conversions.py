"""Conversions between a case and AReaL's records, and the contract of its two clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract, ResumeBy, Rows, Versions
from rollproof.core.records import (
    FinishReason,
    IntArray,
    Request,
    Rollout,
    as_logprobs,
    as_routes,
    as_tokens,
)
from rollproof.errors import SubjectError
from rollproof.stacks._support.subjects import budget_of, client_contract, wants_routes
from rollproof.stacks.areal.upstream import AReaL

if TYPE_CHECKING:
    from rollproof.core.case import Model
    from rollproof.fakes.engine.fleet import Fleet

__all__ = [
    "contract_of",
    "disk_requests",
    "engine_of",
    "model_request",
    "returns_routes",
    "rollout_of",
]

_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def engine_of(fleet: Fleet) -> str:
    """``sglang`` or ``vllm``: which of AReaL's backends speaks to the fleet."""
    return fleet.case.flavour.partition("-")[0]


def returns_routes(fleet: Fleet) -> bool:
    """Whether AReaL is configured with ``return_routed_experts``, a switch for all requests that
    its vLLM backends do not know.
    """
    return engine_of(fleet) == "sglang" and wants_routes(fleet)


def contract_of(fleet: Fleet) -> Contract:
    """What AReaL's clients promise: aborts are resumed out of sight, and every token is tagged.

    A row of routes is that of its own segment. The vLLM backends read no routes.
    """
    sglang = engine_of(fleet) == "sglang"
    return client_contract(
        fleet,
        rows=Rows.FORWARDED if sglang else Rows.NONE,
        resume=ResumeBy.CLIENT,
        versions=Versions.TOKEN,
        **({"dtype": "int32"} if sglang else {}),
    )


def model_request(areal: AReaL, fleet: Fleet, request: Request) -> Any:
    """A ``ModelRequest``, with the sampling parameters that AReaL has."""
    budget = budget_of(request)
    sampling = {
        name: request.sampling[name]
        for name in ("temperature", "top_p", "top_k")
        if name in request.sampling
    }
    config = areal.hyperparameters(
        n_samples=1,
        max_new_tokens=budget,
        max_tokens=len(request.prompt_ids) + 2 * budget,
        **sampling,
    )
    metadata = {"return_routed_experts": True} if returns_routes(fleet) else {}
    return areal.model_request(
        rid=request.request_id,
        input_ids=list(request.prompt_ids),
        gconfig=config,
        metadata=metadata,
    )


def disk_requests(areal: AReaL, backend: Any, version: int | None) -> list[Any]:
    """The requests with which a backend has its server load weights."""
    return list(
        backend.build_disk_weight_update_requests(
            areal.update_meta(type="disk", path=f"weights-{version}")
        ).requests
    )


def rollout_of(request: Request, response: Any, model: Model) -> Rollout:
    """A ``ModelResponse`` as a rollout. Its routes are ``(rows, layers * top_k)``, layers first."""
    routes = response.routed_experts
    return Rollout(
        request_id=request.request_id,
        prompt_ids=as_tokens(response.input_tokens),
        response_ids=as_tokens(response.output_tokens),
        finish_reason=_REASONS.get(response.stop_reason, FinishReason.ERROR),
        logprobs=as_logprobs(response.output_logprobs),
        routes=None if routes is None else as_routes(_by_layer(routes, model)),
        token_versions=tuple(response.output_versions),
    )


def _by_layer(routes: IntArray, model: Model) -> IntArray:
    cells = model.num_layers * model.top_k
    if routes.ndim != 2 or routes.shape[1] != cells:
        raise SubjectError(
            f"AReaL returned routes of shape {routes.shape}: the model has {cells} cells a row."
        )
    return routes.reshape(len(routes), model.num_layers, model.top_k)
