"""slime's rollout, as a subject: ``generate_and_rm_group``, aborts that keep the tokens so far, and
samples that a later rollout continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from rollproof.core.contract import Contract, PartialOff, Provenance, ResumeBy, Rows, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.subjects import (
    ROOM,
    StackOutput,
    StackSubject,
    budget_of,
    client_contract,
    wants_routes,
)
from rollproof.stacks._support.tokenizer import IdTokenizer, spell
from rollproof.stacks.slime.upstream import Slime

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["FLAVOURS", "PartialRollout", "slime_arguments"]

FLAVOURS = ("sglang", "sglang-0.5.17")
_CONCURRENCY = 512
"""Calls at once: no request waits in slime."""
_REASONS = {
    "completed": FinishReason.STOP,
    "truncated": FinishReason.LENGTH,
    "aborted": FinishReason.ABORT,
}


def slime_arguments(fleet: Fleet, router: str) -> Any:
    """The command line that slime's rollout reads."""
    host, _, port = router.removeprefix("http://").partition(":")
    model = fleet.case.model
    return SimpleNamespace(
        ci_test=False,
        sglang_router_ip=host,
        sglang_router_port=int(port),
        sglang_server_concurrency=_CONCURRENCY,
        sglang_dp_size=None,
        rollout_num_engines=len(fleet.servers),
        hf_checkpoint="",
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=ROOM,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        use_rollout_routing_replay=wants_routes(fleet),
        num_layers=model.num_layers,
        moe_router_topk=model.top_k,
        partial_rollout=fleet.case.partial,
        mask_offpolicy_in_partial_rollout=False,
        custom_generate_function_path=None,
        group_rm=False,
    )


class PartialRollout(StackSubject):
    """One request is one sample, a group of its own. An aborted sample goes back to the data
    buffer, and from there into the next rollout.

    A weight update lies between two rollouts: slime's ``abort`` ends the one, the weights are
    loaded, and the other begins.
    """

    def __init__(
        self, slime: Slime, arguments: Callable[[Fleet, str], Any] = slime_arguments
    ) -> None:
        self._slime, self._arguments = slime, arguments

    def start(self, fleet: Fleet) -> None:
        """Make a fresh state and a fresh HTTP client: slime keeps one of each per process."""
        import httpx

        self._fleet = fleet
        # slime aborts what runs between two rollouts, and its servers flush their caches.
        fleet.pause_mode = PauseMode.ABORT
        fleet.clear_cache = True
        # slime reads the label only where there is one (slime#327): both replies are made.
        self._http = HttpFleet(fleet, untagged_aborts=True)
        self._args = self._arguments(fleet, self._http.router)
        # The state of the case before has its semaphore and its loop.
        self._slime.misc.SingletonMeta._instances.pop(self._slime.rollout.GenerateState, None)
        # As init_http_client makes it, but without certificates: loading them takes longer than a
        # case.
        self._slime.http._http_client = httpx.AsyncClient(
            timeout=None,  # noqa: S113 - as in slime
            trust_env=False,
            verify=False,  # noqa: S501 - nothing is encrypted here
        )
        tokenizer = IdTokenizer(eos_token_id=fleet.policy.eos_id)
        with (
            mock.patch.object(self._slime.rollout, "load_tokenizer", return_value=tokenizer),
            mock.patch.object(self._slime.rollout, "load_processor", return_value=None),
        ):
            self._state = self._slime.rollout.GenerateState(self._args)
        self._between_rollouts = asyncio.Lock()
        self.contract: Contract = client_contract(
            fleet,
            rows=Rows.FORWARDED,
            resume=ResumeBy.CLIENT,
            # one per HTTP call, without the calls' lengths
            versions=Versions.CALL,
            loss_mask=True,
            partial_off=PartialOff.DROPPED,
            dtype="int32",
            # A continued sample keeps its tokens and logprobs, and gets the routes of its last
            # call. docs/en/get_started/customization.md promises the rollout's routes, and not of
            # which call; the trainer asserts their number alone (megatron_utils/cp_utils.py).
            provenance=Provenance.LATEST_PREFILL,
        )

    async def rollout(self, request: Request) -> StackOutput | None:
        """Generate. An aborted sample is continued in the next rollout, or dropped without partial
        rollout.
        """
        types = self._slime.types
        sample = types.Sample(prompt=spell(request.prompt_ids), index=0, reward=0.0)
        while True:
            async with self._between_rollouts:
                # `abort` waits for the tasks in `pendings`
                task = asyncio.ensure_future(self._generate(sample, request))
                self._state.pendings.add(task)
            (sample,) = await task
            self._state.pendings.discard(task)
            if sample.status is not types.Sample.Status.ABORTED:
                return StackOutput(request=request, output=sample)
            if not self._args.partial_rollout:
                return None

    async def update_weights(self, version: int | None) -> None:
        """Update between two rollouts. slime's trainer does one update after the other, and numbers
        each of them.
        """
        # Before it waits: another update may be requested meanwhile.
        label = self._fleet.weights_of(None) if version is None else version
        async with self._between_rollouts:
            await self._slime.rollout.abort(self._args, 0)
            try:
                await self._fleet.sync(label, mode=PauseMode.ABORT, clear_cache=True)
            finally:
                self._state.reset()

    def to_record(self, native: StackOutput) -> Rollout:
        """A ``Sample`` as a rollout; weight versions are text on the wire."""
        sample, prompt = native.output, len(native.request.prompt_ids)
        tokens = as_tokens(sample.tokens, what="tokens")
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            finish_reason=_REASONS.get(sample.status.value, FinishReason.ERROR),
            logprobs=as_logprobs(sample.rollout_log_probs or []),
            loss_mask=np.array(mask, dtype=np.int64),
            routes=as_routes(sample.rollout_routed_experts),
            call_versions=tuple(
                int(version) if version.isdecimal() else None for version in sample.weight_versions
            ),
        )

    async def stop(self) -> None:
        """Close the client."""
        await self._slime.http._http_client.aclose()

    def gauges(self) -> Mapping[str, float]:
        """Calls by data-parallel rank, as slime counts them."""
        return {"slime dp_counts": float(sum(self._state.dp_counts))}

    async def _generate(self, sample: Any, request: Request) -> Any:
        params = {**self._state.sampling_params, **request.sampling}
        params["max_new_tokens"] = budget_of(request)
        return await self._slime.rollout.generate_and_rm_group(
            self._args, [sample], sampling_params=params, evaluation=False
        )
