"""TRL's ``_AsyncRolloutLoop`` and ``AsyncGRPOTrainer._sync_weight_merged``, as a subject, on an
HTTP server in memory.
"""

from __future__ import annotations

import asyncio
import queue
import random
from collections.abc import Coroutine, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    KvPolicy,
    MissingLogprobs,
    ResumeBy,
    Rows,
    Sampling,
    TagRead,
    Versions,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Observation
from rollproof.core.records import Request, Rollout, as_logprobs, as_tokens
from rollproof.errors import SubjectError
from rollproof.fakes.engine.exceptions import EngineFailure
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.tokenizer import IdTokenizer, spell
from rollproof.stacks.trl.upstream import Trl

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["LoopSubject"]

_ROOM = 1024
"""``max_completion_length`` for requests that state no limit, in tokens."""
_LABEL: ContextVar[int] = ContextVar("rollproof_trl_label")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The training samples that one conversation became."""

    request: Request
    samples: list[Any]


class LoopSubject:
    """One request is one group of one generation: TRL generates it, scores it, and tags it.

    A loop has one configuration, and TRL keeps generating for ever: there is one loop for each
    request, which stops after its first group.
    """

    contract: Contract

    def __init__(self, trl: Trl, *, multi_turn: bool) -> None:
        self._trl = trl
        self._multi_turn = multi_turn

    def start(self, fleet: Fleet) -> None:
        """TRL's server is one address; its trainer pauses in mode keep, which clears vLLM's cache."""
        self._fleet = fleet
        fleet.pause_mode = PauseMode.KEEP
        fleet.clear_cache = True
        self._http = HttpFleet(fleet)
        self._count = SimpleNamespace(value=0)
        self._labels: dict[int, int] = {0: fleet.case.first_version}
        self._trainer = _Trainer(self)
        random.seed(fleet.case.seed)  # every call is given a seed of its own, which a trace holds
        self.contract = loop_contract(fleet, multi_turn=self._multi_turn)

    async def rollout(self, request: Request) -> Answer | None:
        """The generate loop until its group is whole, then the scoring of that group."""
        import aiohttp

        stop = asyncio.Event()
        loop = self._loop(request, stop)
        async with aiohttp.ClientSession() as session:
            loop.session = session
            await loop._generate_loop(stop)
        samples = await loop._score_group(loop._groups_to_score.get_nowait())
        return (
            Answer(request=request, samples=samples) if samples else None
        )  # a conversation without tokens is not handed over

    async def update_weights(self, version: int | None) -> None:
        """``_sync_weight_merged``, which blocks its process. What it raises, it raises.

        TRL counts its updates and has no name for them but its count: one that the schedule gives
        no label has a number, too.
        """
        _LABEL.set(self._fleet.weights_of(None) if version is None else version)
        self._trl.trainer.AsyncGRPOTrainer._sync_weight_merged(self._trainer, 0.0)

    def to_record(self, native: Answer) -> Rollout:
        """The one sample of a conversation; a conversation whose turns do not continue each other
        would be several.
        """
        if len(native.samples) != 1:
            raise SubjectError(
                f"TRL made {len(native.samples)} samples of a conversation whose texts spell its"
                " ids."
            )
        sample, prompt = native.samples[0], len(native.request.prompt_ids)
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

    def stop(self) -> None:
        """Nothing to free: sessions end with their rollouts."""

    def transfer(self) -> None:
        """TRL's transfer to all servers behind its address; raises what the first one raises, after
        all had their turn.
        """
        label, errors = _LABEL.get(), []
        true = self._fleet.weights_of(label)
        for engine in self._fleet.servers.values():
            try:
                engine.load_now(true, label, identity=true == engine.version)
            except EngineFailure as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def everywhere(self, deed: str, *arguments: Any) -> None:
        """Pause or resume all servers; in the modes that TRL uses neither waits for anything."""
        for engine in self._fleet.servers.values():
            if engine.alive:
                _at_once(getattr(engine, deed)(*arguments))

    def published(self, count: int) -> None:
        """TRL counts its updates: remember under which label the last one was published."""
        self._labels[count] = _LABEL.get()
        self._count.value = count

    def _loop(self, request: Request, stop: asyncio.Event) -> Any:
        """TRL's loop over this one conversation."""
        turns = list(request.turns) if self._multi_turn else []
        tokenizer = _ToolTokenizer(turns, self._fleet.policy.eos_id)

        def environment() -> str:
            turn = tokenizer.turns.pop(0)
            self._fleet.recorder.record(Observation(request_id=request.request_id, token_ids=turn))
            return spell(turn)

        sampling = {
            name: value
            for name, value in request.sampling.items()
            if name in ("temperature", "top_p", "top_k", "min_p")
        }
        loop = self._trl.worker._AsyncRolloutLoop(
            model_name="policy",
            dataset=_Once({"prompt": [{"role": "user", "content": spell(request.prompt_ids)}]}),
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
            max_tokens=_ROOM if request.budget is None else request.budget,
            request_timeout=10**6,
            **sampling,
        )
        loop._loop.close()  # it made one of its own, which runs in its process
        loop.tools, loop._standalone_tools = [environment], [environment]
        loop._groups_to_score = _Last(stop)
        return loop


class _Trainer:
    """What ``_sync_weight_merged`` uses of the trainer."""

    def __init__(self, subject: LoopSubject) -> None:
        self._subject = subject
        import torch

        self.model: Any = torch.nn.Identity()
        self.model_version = 0
        self.accelerator: Any = SimpleNamespace(
            is_main_process=True, unwrap_model=lambda model: model, wait_for_everyone=lambda: None
        )
        self.weight_transfer: Any = SimpleNamespace(
            pause=lambda: subject.everywhere("pause", PauseMode.KEEP, True),
            resume=lambda: subject.everywhere("resume"),
            send_weights=lambda _weights: subject.transfer(),
        )
        self.rollout_worker: Any = SimpleNamespace(update_model_version=subject.published)

    def _streaming_iter(self) -> Iterator[Any]:
        return iter(())


class _ToolTokenizer(IdTokenizer):
    """Parses a turn that ended by itself as a call of the one tool, while answers are left."""

    response_template: Mapping[str, Any] = {}

    def parse_response(self, ids: list[int], **_options: Any) -> dict[str, Any]:
        """The message of one turn."""
        message: dict[str, Any] = {"role": "assistant", "content": spell(ids)}
        if self.turns and ids[-1:] == [self.eos_token_id]:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": "environment", "arguments": {}}}
            ]
        return message


class _Once:
    """A data set of one row."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._row = row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([self._row])

    def __len__(self) -> int:
        return 1


class _Last(asyncio.Queue[Any]):
    """A queue whose first entry is the last that is wanted."""

    def __init__(self, stop: asyncio.Event) -> None:
        super().__init__()
        self._stop = stop

    def put_nowait(self, item: Any) -> None:
        super().put_nowait(item)
        self._stop.set()


def _no_reward(completions: list[Any], **_columns: Any) -> list[float]:
    return [0.0] * len(completions)


def _at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``, which waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise SubjectError("An engine had to wait where TRL's trainer blocks its process.")


def loop_contract(fleet: Fleet, *, multi_turn: bool) -> Contract:
    """What TRL's loop promises: tokens, logprobs, a mask, and the trainer's count of updates when
    the group began.

    It never resumes: an update freezes requests in the engine (mode keep), and drops their KV. It
    does not read why a call ended, so a sample says nothing of it. Sampling parameters are the
    loop's configuration. There are no routes.
    """
    contract = Contract(
        rows=Rows.NONE,
        resume=ResumeBy.ENGINE,
        versions=Versions.SAMPLE,
        tag_read=TagRead.ADMISSION,
        logprobs=fleet.flavour.logprobs,
        abort_surfaces=False,
        finish_reason=False,
        sampling=Sampling.OWN,
        kv_policy=KvPolicy.RECOMPUTE,
        loss_mask=True,
        missing_logprobs=MissingLogprobs.MASKED,
    )
    return replace(contract, multi_turn=True) if multi_turn else contract
