"""SkyRL's ``RemoteInferenceClient`` and its weight update, as a subject, on HTTP servers in
memory.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract, KvPolicy, ResumeBy, Rows, Sampling, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.simulation.mutation_guard import lend
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.subjects import (
    StackOutput,
    StackSubject,
    client_contract,
    load_on_every_engine,
    wants_routes,
)
from rollproof.stacks._support.tokenizer import IdTokenizer
from rollproof.stacks.skyrl.release import RouteForm
from rollproof.stacks.skyrl.upstream import SkyRL

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["ClientSubject", "SkyRLHost", "reason_of", "sampling_of", "skyrl_contract"]

_LABEL: ContextVar[int | None] = ContextVar("rollproof_skyrl_label", default=None)
"""Label of the update that the running task does."""


class SkyRLHost:
    """SkyRL's client of a fleet, and its procedure of weight updates."""

    def __init__(self, fleet: Fleet, skyrl: SkyRL) -> None:
        self.fleet = fleet
        # SkyRL's update freezes what runs, and clears no prefix cache: calls go on with the KV that
        # they have.
        fleet.pause_mode = PauseMode.KEEP
        fleet.clear_cache = False
        self.http: HttpFleet = HttpFleet(fleet, nested_routes=skyrl.facts.routes is RouteForm.LISTS)
        self.tokenizer: IdTokenizer = IdTokenizer(eos_token_id=fleet.policy.eos_id)
        self.client: Any = skyrl.client(
            proxy_url=self.http.router,
            server_urls=list(self.http.urls.values()),
            data_parallel_size=1,
            model_name="policy",
            enable_return_routed_experts=wants_routes(fleet),
            tokenizer=self.tokenizer,
        )
        self._dispatch = _dispatch(skyrl.dispatch, self)

    async def update_weights(self, version: int | None) -> None:
        """Call ``WorkerDispatch.save_weights_for_sampler``: pause in mode keep, broadcast, resume.
        Raises what it raises.
        """
        _LABEL.set(version)
        await self._dispatch.save_weights_for_sampler()

    def broadcast(self, *_workers: Any, **_options: Any) -> None:
        """The transfer, which blocks SkyRL's loop. Raises what the first engine raises."""
        load_on_every_engine(self.fleet, _LABEL.get())

    async def close(self) -> None:
        """Close the client's session."""
        await self.client.teardown()


def sampling_of(request: Request) -> dict[str, Any]:
    """Sampling parameters of vLLM for ``request``; 0 logprobs are those of the sampled tokens."""
    sampling: dict[str, Any] = dict(request.sampling)
    if request.want_logprobs:
        sampling["logprobs"] = 0
    if request.budget is not None:
        sampling["max_tokens"] = request.budget
    return sampling


def reason_of(stop_reason: str | None) -> FinishReason | None:
    """The finish reason for ``stop_reason``, vLLM's word."""
    known = {
        str(reason): reason
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
    }
    return None if stop_reason is None else known.get(stop_reason, FinishReason.ERROR)


class ClientSubject(StackSubject):
    """One request is one ``generate`` of the client."""

    def __init__(self, skyrl: SkyRL) -> None:
        self._skyrl = skyrl

    def start(self, fleet: Fleet) -> None:
        """Make the client of the fleet's servers."""
        self._host = SkyRLHost(fleet, self._skyrl)
        self.contract: Contract = skyrl_contract(fleet, self._skyrl)

    async def rollout(self, request: Request) -> StackOutput:
        """``generate`` of a batch of one, with arguments in which changes are noticed."""
        sampling = lend("sampling_params", sampling_of(request))
        batch = {
            "prompt_token_ids": [lend("prompt_token_ids", list(request.prompt_ids))],
            "sampling_params": sampling,
            "session_ids": [request.request_id],
        }
        output = await self._host.client.generate(batch)
        return StackOutput(request=request, output=output)

    async def update_weights(self, version: int | None) -> None:
        """Update by SkyRL's own procedure."""
        await self._host.update_weights(version)

    def to_record(self, native: StackOutput) -> Rollout:
        """An ``InferenceEngineOutput`` of one as a rollout."""
        output = native.output
        logprobs, routes = output["response_logprobs"], output["rollout_expert_indices"]
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=native.request.prompt_ids,
            response_ids=as_tokens(output["response_ids"][0]),
            finish_reason=reason_of(output["stop_reasons"][0]),
            logprobs=None if logprobs is None else as_logprobs(logprobs[0]),
            routes=None if routes is None else as_routes(routes[0]),
        )

    async def stop(self) -> None:
        """Close the session."""
        await self._host.close()


def skyrl_contract(fleet: Fleet, skyrl: SkyRL) -> Contract:
    """What SkyRL's client promises: the engine's reply, without a version."""
    return client_contract(
        fleet,
        rows=Rows.FORWARDED,
        # It never resumes: a weight update freezes requests in the engine (mode keep, no cache
        # cleared), and a request that is aborted otherwise comes out with the word ``abort``.
        resume=ResumeBy.ENGINE,
        versions=Versions.NONE,
        # the docstring of PauseMode.ABORT: the caller gets what there is, and has to retry
        abort_surfaces=True,
        sampling=Sampling.FORWARDED,
        kv_policy=KvPolicy.KEEP,
        # a comment in WorkerDispatch.save_weights_for_sampler: requests in flight must not read
        # weights that have arrived in part
        updates_pause=True,
        dtype="int64" if skyrl.facts.routes is RouteForm.LISTS else "uint8|int16|int32",
    )


def _dispatch(base: Any, host: SkyRLHost) -> Any:
    """A ``WorkerDispatch`` without workers: ``save_weights_for_sampler`` is SkyRL's, the transfer
    below it is ours.
    """

    class Dispatch(base):  # type: ignore[misc]  # the base is SkyRL's, known at run time only
        def __init__(self) -> None:
            # The branch of save_weights_for_sampler that is neither LoRA, colocated, nor sleeping.
            lora = SimpleNamespace(rank=0)
            policy = SimpleNamespace(model=SimpleNamespace(lora=lora), megatron_config=None)
            engine = SimpleNamespace(offload_kv_for_weight_sync=False, weight_sync_backend="nccl")
            self.cfg = SimpleNamespace(
                trainer=SimpleNamespace(strategy="fsdp", policy=policy),
                generator=SimpleNamespace(inference_engine=engine),
            )
            self.colocate_all = False
            self._actor_groups: dict[str, Any] = {}
            self._inference_engine_client = host.client

        def _broadcast_to_inference_engines(self, *workers: Any, **options: Any) -> None:
            host.broadcast(*workers, **options)

    return Dispatch()
