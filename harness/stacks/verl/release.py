"""The releases of verl that the adapters know, and what differs between them, as data.

Every release so far has moved the resume client or changed its constructor: importing it fails for
a version that is not in the table and differs so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollproof.stacks.releases import Release

__all__ = ["RELEASE", "VERSIONS", "RouteArray", "VerlVersion"]


class RouteArray(StrEnum):
    """Type of ``routed_experts`` that verl's SGLang server returns."""

    TENSOR = "tensor"
    """The CPU tensor that SGLang's tokenizer manager returned."""
    NUMPY = "numpy"
    """Its ``.numpy()``, since verl#7158."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlVersion:
    """What differs in a release.

    Fields:
        client: ``module:class`` of the resume client.
        balancer: ``module:class`` of the load balancer.
        reads_async_training: The client needs ``config.async_training.partial_rollout``.
        pins_budget: The client grants the configured response length if the caller states no
            limit.
        tags_empty_abort: vLLM's reply to an abort before the first token has ``global_steps``.
        reports_cached_tokens: vLLM's replies have the hits of the prefix cache.
        sglang_routes: Type of the routes of verl's SGLang server.
        dict_routes, padded_routes: The numpy types of the routes in the batches of ``as_dict`` and
            of ``_postprocess``.
        unpads_on_cpu: Padding can be removed without flash-attn.
    """

    client: str
    balancer: str = "verl.workers.rollout.llm_server:GlobalRequestLoadBalancer"
    reads_async_training: bool = False
    pins_budget: bool = True
    tags_empty_abort: bool = True
    reports_cached_tokens: bool = False
    sglang_routes: RouteArray = RouteArray.NUMPY
    dict_routes: str = "int16"
    padded_routes: str = "int16"
    unpads_on_cpu: bool = False


_LLM_SERVER = "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient"
VERSIONS: Mapping[str, VerlVersion] = {
    "0.8.0": VerlVersion(
        client=(
            "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncLLMServerClient"
        ),
        reads_async_training=True,
        # a resume is granted the budget again (verl#7207)
        pins_budget=False,
        tags_empty_abort=False,
        # the server hands on what SGLang returned (verl#7158)
        sglang_routes=RouteArray.TENSOR,
        dict_routes="int64",
        padded_routes="uint8|uint16|int16|int32|int64",
    ),
    # the client has moved out of the experimental package
    "0.9.0": VerlVersion(client=_LLM_SERVER),
    "0.9.1": VerlVersion(
        client=_LLM_SERVER,
        # it draws among equally loaded servers
        balancer="verl.workers.rollout.router:GlobalRequestLoadBalancer",
        reports_cached_tokens=True,
        unpads_on_cpu=True,
    ),
}
RELEASE = Release(
    stack="verl",
    distribution="verl",
    versions=tuple(VERSIONS),
    module_file="verl/workers/rollout/replica.py",
)
