"""RLinf's ``SGLangWorker._async_generate_group``, its ``SeqGroupInfo`` and its ``RolloutResult``,
as a subject.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract, ResumeBy, Rows, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_tokens
from rollproof.stacks._support.subjects import (
    StackOutput,
    StackSubject,
    budget_of,
    client_contract,
    sglang_meta_info,
)
from rollproof.stacks.rlinf.upstream import RLinf

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["WorkerSubject"]


class _Engine:
    """SGLang's ``Engine.async_generate`` over an engine of the fleet."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def async_generate(
        self,
        *,
        prompt: Any,
        sampling_params: Mapping[str, Any],
        input_ids: list[int],
        image_data: Any,
        return_logprob: bool,
    ) -> dict[str, Any]:
        """One call, and SGLang's dictionary."""
        sampling = {
            name: value for name, value in sampling_params.items() if name != "max_new_tokens"
        }
        output = await self._engine.generate(
            prompt_ids=input_ids,
            max_tokens=sampling_params["max_new_tokens"],
            sampling=sampling,
            want_routes=False,
            want_logprobs=return_logprob,
        )
        return {"output_ids": list(output.token_ids), "meta_info": sglang_meta_info(output)}


class WorkerSubject(StackSubject):
    """One request is a group of one. A group that comes back aborted continues on the next worker,
    as RLinf's scheduler migrates it.

    The worker's constructor starts an engine, and its ``rollout`` reads Ray channels: both are left
    out.
    """

    def __init__(self, rlinf: RLinf) -> None:
        self._rlinf = rlinf

    def start(self, fleet: Fleet) -> None:
        """Declare the contract; a worker is made for each call.

        RLinf updates weights between rollouts; here updates abort what runs, which then migrates.
        """
        fleet.pause_mode = PauseMode.ABORT
        fleet.clear_cache = True
        self._fleet = fleet
        self.contract: Contract = client_contract(
            fleet, rows=Rows.NONE, resume=ResumeBy.CLIENT, versions=Versions.NONE
        )

    async def rollout(self, request: Request) -> StackOutput:
        """Generate until the group is complete. Raises what RLinf raises."""
        group = self._rlinf.group(id=0, input_ids=list(request.prompt_ids), answer=[], group_size=1)
        while not group.all_completed:
            server = self._fleet.balancer.acquire()
            try:
                await self._worker(server, request)._async_generate_group(group)
            finally:
                self._fleet.balancer.release(server)
            if not group.all_completed:
                # the scheduler needs a moment to migrate a group
                await asyncio.sleep(self._fleet.case.engine.step)
        result = self._rlinf.result.from_sglang_seq_group(group, request.want_logprobs)
        return StackOutput(request=request, output=result)

    async def update_weights(self, version: int | None) -> None:
        """Update the fleet: RLinf's own updates go from trainer to scheduler by its collectives."""
        await self._fleet.sync(version)

    def to_record(self, native: StackOutput) -> Rollout:
        """The one sample of a ``RolloutResult``, which says of its end only whether it was a
        stop.
        """
        result = native.output
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=as_tokens(result.prompt_ids[0]),
            response_ids=as_tokens(result.response_ids[0]),
            finish_reason=FinishReason.STOP if result.is_end[0] else FinishReason.LENGTH,
            logprobs=(
                None if result.rollout_logprobs is None else as_logprobs(result.rollout_logprobs[0])
            ),
        )

    def _worker(self, server: str, request: Request) -> Any:
        # The constructor starts an engine.
        worker = object.__new__(self._rlinf.worker)
        worker._engine = _Engine(self._fleet.servers[server])
        worker._sampling_params = {**request.sampling, "max_new_tokens": budget_of(request)}
        worker._return_logprobs = request.want_logprobs
        worker._logger = None
        worker.log_warning = lambda _text: None
        return worker
