"""TRL's ``_AsyncRolloutLoop`` and ``AsyncGRPOTrainer._sync_weight_merged``, as a subject, on an
HTTP server in memory.
"""

from __future__ import annotations

import asyncio
import queue
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import Contract, MissingLogprobs, ResumeBy, Rows, TagRead, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Rollout, as_logprobs, as_tokens
from rollproof.errors import SubjectError
from rollproof.stacks._support.blocking import BlockingProcess
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.subjects import (
    StackOutput,
    StackSubject,
    budget_of,
    client_contract,
    record_turn,
)
from rollproof.stacks._support.tokenizer import IdTokenizer, spell
from rollproof.stacks.trl.upstream import Trl

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["LoopSubject"]

_LABEL: ContextVar[int] = ContextVar("rollproof_trl_label")
"""Label of the update that the running task does."""


class LoopSubject(StackSubject):
    """One request is one group of one generation: TRL generates it, scores it, and tags it.

    A loop has one configuration, and TRL generates without end: there is one loop for each request,
    which stops after its first group.
    """

    def __init__(self, trl: Trl, *, multi_turn: bool) -> None:
        self._trl = trl
        self._multi_turn = multi_turn

    def start(self, fleet: Fleet) -> None:
        """Make the servers, which TRL knows by one address, and what its trainer's update uses."""
        self._fleet = fleet
        # TRL's trainer pauses in mode keep, which clears vLLM's cache.
        fleet.pause_mode = PauseMode.KEEP
        fleet.clear_cache = True
        self._http = HttpFleet(fleet)
        self._count = SimpleNamespace(value=0)
        self._labels: dict[int, int] = {0: fleet.case.first_version}
        self._trainer = _Trainer(self)
        self._process, self._updating = BlockingProcess(), asyncio.Lock()
        # TRL draws a seed for every call, and the trace records it
        random.seed(fleet.case.seed)
        self.contract: Contract = loop_contract(fleet, multi_turn=self._multi_turn)

    async def rollout(self, request: Request) -> StackOutput | None:
        """Run the generate loop until its group is complete, then score that group."""
        import aiohttp

        stop = asyncio.Event()
        loop = self._make_loop(request, stop)
        async with aiohttp.ClientSession() as session:
            loop.session = session
            await loop._generate_loop(stop)
        samples = await loop._score_group(loop._groups_to_score.get_nowait())
        # a conversation without tokens becomes no sample
        return StackOutput(request=request, output=samples) if samples else None

    async def update_weights(self, version: int | None) -> None:
        """Call ``_sync_weight_merged``, which blocks its process. Raises what that raises.

        TRL numbers its updates, so one that the schedule gives no label has a number, too.
        """
        # a process that blocks does one update after the other
        async with self._updating:
            _LABEL.set(self._fleet.weights_of(None) if version is None else version)
            await self._process.run(
                lambda: self._trl.trainer.AsyncGRPOTrainer._sync_weight_merged(self._trainer, 0.0)
            )

    def to_record(self, native: StackOutput) -> Rollout:
        """The only sample of a conversation: there would be several if its turns did not continue
        each other.
        """
        samples, prompt = native.output, len(native.request.prompt_ids)
        if len(samples) != 1:
            raise SubjectError(
                f"TRL made {len(samples)} samples of a conversation whose texts spell its ids."
            )
        sample = samples[0]
        tokens = as_tokens(sample.input_ids, what="input_ids")
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            finish_reason=None,
            logprobs=as_logprobs(sample.old_log_probs[prompt:].astype(np.float64)),
            loss_mask=sample.completion_mask[prompt:].copy(),
            version=self._labels[sample.model_version],
        )

    def transfer(self) -> None:
        """TRL's transfer to all servers of its address. Raises what the first one raises."""
        label = _LABEL.get()
        version = self._fleet.weights_of(label)

        async def load() -> None:
            loads = (
                engine.load(version, label, identity=version == engine.version)
                for engine in self._fleet.servers.values()
            )
            # servers are processes of their own: one that fails does not stop the others
            results = await asyncio.gather(*loads, return_exceptions=True)
            for error in results:
                if error is not None:
                    raise error

        self._process.wait(load())

    def pause(self) -> None:
        """Pause all servers."""
        self._process.wait(self._on_each(lambda engine: engine.pause(PauseMode.KEEP, True)))

    def resume(self) -> None:
        """Resume all servers."""
        self._process.wait(self._on_each(lambda engine: engine.resume()))

    def publish(self, count: int) -> None:
        """Remember the label of TRL's update number ``count``."""
        self._labels[count] = _LABEL.get()
        self._count.value = count

    async def _on_each(self, call: Callable[[FakeEngine], Awaitable[None]]) -> None:
        """Call every living server at once, as their address does."""
        await asyncio.gather(*(call(e) for e in self._fleet.servers.values() if e.alive))

    def _make_loop(self, request: Request, stop: asyncio.Event) -> Any:
        """TRL's loop over this one conversation."""
        turns = list(request.turns) if self._multi_turn else []
        tokenizer = _ToolTokenizer(turns, self._fleet.policy.eos_id)

        def environment() -> str:
            turn = tokenizer.turns.pop(0)
            record_turn(self._fleet, request, turn)
            return spell(turn)

        sampling = {
            name: value
            for name, value in request.sampling.items()
            if name in ("temperature", "top_p", "top_k", "min_p")
        }
        loop = self._trl.worker._AsyncRolloutLoop(
            model_name="policy",
            dataset=_OneRow({"prompt": [{"role": "user", "content": spell(request.prompt_ids)}]}),
            reward_funcs=[_no_reward],
            processing_class=tokenizer,
            eos_token_ids=[self._fleet.policy.eos_id],
            rollout_buffer=queue.Queue(),
            model_version_value=self._count,
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=SimpleNamespace(set=lambda: None),
            exception_info_queue=queue.Queue(),
            metrics_queue=queue.Queue(),
            num_generations=1,
            max_inflight_tasks=1,
            vllm_server_url=self._http.router,
            max_tokens=budget_of(request),
            request_timeout=10**6,
            **sampling,
        )
        # it has made an event loop for its process
        loop._loop.close()
        loop.tools, loop._standalone_tools = [environment], [environment]
        loop._groups_to_score = _OneGroupQueue(stop)
        return loop


class _Trainer:
    """The fields of the trainer that ``_sync_weight_merged`` reads."""

    def __init__(self, subject: LoopSubject) -> None:
        import torch

        # no parameters: the transfer is that of the fleet
        self.model: Any = torch.nn.Identity()
        self.model_version = 0
        self.accelerator: Any = SimpleNamespace(
            is_main_process=True, unwrap_model=lambda model: model, wait_for_everyone=lambda: None
        )
        self.weight_transfer: Any = SimpleNamespace(
            pause=subject.pause,
            resume=subject.resume,
            send_weights=lambda _weights: subject.transfer(),
        )
        self.rollout_worker: Any = SimpleNamespace(update_model_version=subject.publish)

    def _streaming_iter(self) -> Iterator[Any]:
        return iter(())


class _ToolTokenizer(IdTokenizer):
    """Parses a turn that ended by itself as a call of the only tool, while turns are left."""

    response_template: Mapping[str, Any] = {}

    def parse_response(self, ids: list[int], **_options: Any) -> dict[str, Any]:
        """The message of one turn."""
        message: dict[str, Any] = {"role": "assistant", "content": spell(ids)}
        if self.turns and ids[-1:] == [self.eos_token_id]:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": "environment", "arguments": {}}}
            ]
        return message


class _OneRow:
    """A data set of one row."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._row = row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([self._row])

    def __len__(self) -> int:
        return 1


class _OneGroupQueue(asyncio.Queue[Any]):
    """A queue whose first entry ends the loop."""

    def __init__(self, stop: asyncio.Event) -> None:
        super().__init__()
        self._stop = stop

    def put_nowait(self, item: Any) -> None:
        super().put_nowait(item)
        self._stop.set()


def _no_reward(completions: list[Any], **_columns: Any) -> list[float]:
    return [0.0] * len(completions)


def loop_contract(fleet: Fleet, *, multi_turn: bool) -> Contract:
    """What TRL's loop promises: tokens, logprobs, a mask, and the trainer's count of updates when
    the group began.
    """
    return client_contract(
        fleet,
        rows=Rows.NONE,
        # It never resumes: an update freezes requests in the engine (mode keep), and drops their
        # KV.
        resume=ResumeBy.ENGINE,
        versions=Versions.SAMPLE,
        tag_read=TagRead.ADMISSION,
        # the loop does not read why a call ended
        finish_reason=False,
        loss_mask=True,
        missing_logprobs=MissingLogprobs.MASKED,
        multi_turn=multi_turn,
    )
