"""verl's resume client, ``FullyAsyncLLMServerClient`` with verl's own load balancer, as a
subject.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.fakes.engine.balancer import Balancer
from rollproof.fakes.engine.fleet import CURRENT_REQUEST
from rollproof.fakes.engine.ray_handles import RayHandle
from rollproof.simulation.mutation_guard import lend
from rollproof.stacks._support.subjects import StackOutput, StackSubject
from rollproof.stacks.verl.configuration import config_of, lengths_of, verl_contract
from rollproof.stacks.verl.rollout_servers import (
    CONVENTIONS,
    Lengths,
    VerlServer,
    finish_reason_of,
    servers_of,
)
from rollproof.stacks.verl.upstream import Verl

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["ClientSubject", "VerlHost", "sampling_of"]


class VerlHost:
    """verl's servers, load balancer and clients over a fleet, which every part of verl uses.

    ``response_of`` returns the configured response length for a request. There is one client per
    length: a client has one configuration, while the requests of a case may differ.
    """

    def __init__(
        self, fleet: Fleet, verl: Verl, response_of: Callable[[Request], int | None]
    ) -> None:
        self.fleet = fleet
        self.verl = verl
        self.response_of = response_of
        self._responses = {
            request.request_id: response_of(request) for request in fleet.case.requests
        }
        self.servers: dict[str, VerlServer] = servers_of(fleet, verl, self._lengths)
        handles = {name: RayHandle(server) for name, server in self.servers.items()}
        self.balancer: Any = verl.balancer(dict(handles))
        fleet.balancer = _FleetBalancer(self.balancer, handles)
        # verl's client awaits `handle.method.remote(...)`, and never looks at the actor itself.
        self._handle = RayHandle(self.balancer)
        self._clients: dict[int | None, Any] = {}
        self._configs: dict[int | None, Any] = {}
        # Since 0.9.1 the balancer draws among equals from the global generator: without this seed a
        # case would not have one trace.
        random.seed(fleet.case.seed)

    def config(self, request: Request) -> Any:
        """The configuration for ``request``."""
        response = self.response_of(request)
        if response not in self._configs:
            self._configs[response] = config_of(
                self.fleet.case, self.verl, lengths_of(self.fleet.case, response)
            )
        return self._configs[response]

    def client(self, request: Request) -> Any:
        """The client of verl for ``request``."""
        response = self.response_of(request)
        if response not in self._clients:
            self._clients[response] = self.verl.client(
                config=self.config(request), load_balancer_handle=self._handle
            )
        return self._clients[response]

    async def sync(self, version: int | None) -> None:
        """Update in verl's order: abort, load, and publish the step if there is one."""
        for server in self.servers.values():
            server.note_steps()
        await self.fleet.sync(version, mode=PauseMode.ABORT, clear_cache=True)

    def media(self, request: Request) -> dict[str, Any]:
        """The arguments with the request's media, the same handle as each kind that the server
        takes.
        """
        if request.media is None:
            return {}
        names = [f"{kind}_data" for kind in CONVENTIONS[self.fleet.flavour.name].media]
        return {name: lend(name, [request.media]) for name in names}

    def gauges(self) -> dict[str, float]:
        """Requests in flight, as the balancer counts them."""
        return {"verl balancer/in flight": float(self.balancer.get_status()["total_inflight"])}

    def _lengths(self) -> Lengths:
        return lengths_of(self.fleet.case, self._responses.get(CURRENT_REQUEST.get() or ""))


class _FleetBalancer(Balancer):
    """The balancer that a case acts on: a server that leaves it is removed from verl's, and added
    again when it joins.
    """

    def __init__(self, balancer: Any, handles: Mapping[str, RayHandle]) -> None:
        super().__init__(tuple(handles))
        self._balancer, self._handles = balancer, handles
        self._removed: set[str] = set()

    def leave(self, server: str) -> None:
        super().leave(server)
        # verl's raises where no server is left
        if server not in self._removed and len(self._removed) + 1 < len(self._handles):
            self._removed.add(server)
            self._balancer.remove_servers([server])

    def join(self, server: str) -> None:
        super().join(server)
        if server in self._removed:
            self._removed.remove(server)
            self._balancer.add_servers({server: self._handles[server]})


def sampling_of(request: Request) -> dict[str, Any]:
    """The sampling parameters that a caller passes to verl for ``request``.

    A caller that states a limit states the tighter one: verl reads the configured response length
    only if none is stated.
    """
    sampling: dict[str, Any] = {**request.sampling, "logprobs": request.want_logprobs}
    if request.max_tokens is not None:
        sampling["max_tokens"] = request.budget
    return sampling


class ClientSubject(StackSubject):
    """One request is one ``generate`` of the client."""

    def __init__(self, verl: Verl) -> None:
        self._verl = verl

    def start(self, fleet: Fleet) -> None:
        """Put verl's servers in front of the fleet's engines."""
        # verl aborts what runs before it loads weights, and its servers clear their caches.
        fleet.pause_mode = PauseMode.ABORT
        fleet.clear_cache = True
        self._host = VerlHost(fleet, self._verl, lambda request: request.limit)
        self.contract: Contract = verl_contract(fleet)

    async def rollout(self, request: Request) -> StackOutput:
        """``generate``, with arguments in which changes are noticed."""
        output = await self._host.client(request).generate(
            request_id=request.request_id,
            prompt_ids=lend("prompt_ids", list(request.prompt_ids)),
            sampling_params=lend("sampling_params", sampling_of(request)),
            **self._host.media(request),
        )
        return StackOutput(request=request, output=output)

    async def update_weights(self, version: int | None) -> None:
        """Update as verl's checkpoint engine does, without its worker groups: the part
        checkpoint-manager has them.
        """
        await self._host.sync(version)

    def to_record(self, native: StackOutput) -> Rollout:
        """A ``TokenOutput`` as a rollout."""
        output = native.output
        tokens = as_tokens(output.token_ids)
        # without the wish for logprobs verl's list is empty, which is no statement about them
        silent = not native.request.want_logprobs and not output.log_probs
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=native.request.prompt_ids,
            response_ids=tokens,
            finish_reason=finish_reason_of(output.stop_reason),
            logprobs=None if silent else as_logprobs(output.log_probs),
            routes=as_routes(output.routed_experts),
            min_version=output.extra_fields.get("min_global_steps"),
            max_version=output.extra_fields.get("max_global_steps"),
        )

    def gauges(self) -> Mapping[str, float]:
        """Requests in flight, as the balancer counts them."""
        return self._host.gauges()
