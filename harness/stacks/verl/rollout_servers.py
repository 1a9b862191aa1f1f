"""verl's rollout servers, on fake engines: the method names, the defaults and the conventions of
its vLLM and SGLang servers.

verl's own server classes import the engines and cannot be loaded without them. So this is the only
part of verl that is reimplemented here, after ``vllm_async_server.py`` and
``async_sglang_server.py``; everything above it is verl's own code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import EngineOutput, FinishReason, Version
from rollproof.stacks._support.subjects import wants_routes
from rollproof.stacks.verl.release import RouteArray, VerlVersion
from rollproof.stacks.verl.upstream import Verl

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = [
    "CONVENTIONS",
    "Lengths",
    "ServerConvention",
    "VerlServer",
    "finish_reason_of",
    "servers_of",
    "token_output_fields",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConvention:
    """How one of verl's servers replies.

    Fields:
        name: Its ``rollout.name``.
        stop_reason: Its word for each finish reason.
        least: The smallest budget that it grants, in tokens.
        empty_logprobs: An abort before the first token has an empty list of logprobs, not None.
        keeps_routes: Such an abort has its routes.
        engine_tensors: The engine returns routes as tensors.
        counts_cached: Replies can say how much of the prompt was in the prefix cache.
        media: The kinds of media that it takes, each as the argument ``KIND_data``.
    """

    name: str
    stop_reason: Mapping[FinishReason, str]
    least: int
    empty_logprobs: bool
    keeps_routes: bool
    engine_tensors: bool
    counts_cached: bool
    media: tuple[str, ...]


CONVENTIONS: Mapping[str, ServerConvention] = {
    "vllm": ServerConvention(
        name="vllm",
        stop_reason={
            FinishReason.ABORT: "aborted",
            FinishReason.STOP: "completed",
            FinishReason.LENGTH: "completed",
        },
        least=1,
        empty_logprobs=False,
        keeps_routes=False,
        engine_tensors=False,
        counts_cached=True,
        media=("image", "video", "audio"),
    ),
    "sglang": ServerConvention(
        name="sglang",
        stop_reason={
            reason: str(reason)
            for reason in (FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH)
        },
        least=0,
        empty_logprobs=True,
        keeps_routes=True,
        engine_tensors=True,
        counts_cached=False,
        # verl's client replaces videos by what its agent loop has computed of them
        media=("image",),
    ),
}
"""By engine flavour."""

_REASONS: Mapping[str, FinishReason] = {
    "aborted": FinishReason.ABORT,
    "abort": FinishReason.ABORT,
    "completed": FinishReason.COMPLETED,
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}


def finish_reason_of(stop_reason: str | None) -> FinishReason | None:
    """The finish reason for verl's ``stop_reason``; an unknown one is an error."""
    return None if stop_reason is None else _REASONS.get(stop_reason, FinishReason.ERROR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """``rollout.prompt_length``, ``rollout.response_length`` and ``rollout.max_model_len``, in
    tokens.
    """

    prompt: int
    response: int
    model: int

    def budget(self, stated: int | None, sent: int, least: int) -> int:
        """The budget that a server grants to a call of ``sent`` tokens.

        Args:
            stated: The limit in the call's sampling parameters, if any.
            sent: Tokens of the prompt.
            least: The smallest budget that the server grants.
        """
        # the default of verl's servers (verl#7207)
        limit = min(self.response, self.prompt + self.response - sent) if stated is None else stated
        return max(least, min(limit, self.model - sent))


def token_output_fields(
    output: EngineOutput,
    convention: ServerConvention,
    facts: VerlVersion,
    *,
    tag: Version,
    want_logprobs: bool,
) -> dict[str, Any]:
    """The fields of the ``TokenOutput`` that verl's server makes of an engine's reply."""
    reason = convention.stop_reason.get(output.finish_reason, str(output.finish_reason))
    extra: dict[str, Any] = {"global_steps": tag}
    if not output.token_ids:
        # vLLM's server of 0.8.0 returns early, before it adds the tag
        if not (facts.tags_empty_abort or convention.keeps_routes):
            extra = {}
        nothing: list[float] | None = [] if convention.empty_logprobs and want_logprobs else None
        routes = _routes(output, convention, facts) if convention.keeps_routes else None
        return {
            "token_ids": [],
            "log_probs": nothing,
            "routed_experts": routes,
            "stop_reason": reason,
            "extra_fields": extra,
        }
    if facts.reports_cached_tokens and convention.counts_cached:
        extra["num_cached_tokens"] = output.cached_tokens
    logprobs = (
        None
        if output.logprobs is None or not want_logprobs
        else [float(value) for value in output.logprobs]
    )
    return {
        "token_ids": list(output.token_ids),
        "log_probs": logprobs,
        "routed_experts": _routes(output, convention, facts),
        "stop_reason": reason,
        "extra_fields": extra,
    }


def _routes(output: EngineOutput, convention: ServerConvention, facts: VerlVersion) -> Any:
    if (
        output.routes is None
        or not convention.engine_tensors
        or facts.sglang_routes is RouteArray.NUMPY
    ):
        return output.routes
    # SGLang's tokenizer manager returns a CPU tensor
    import torch

    return torch.from_numpy(output.routes.copy())


class VerlServer:
    """The actor that verl's client calls, over a fake engine, with the methods of verl's server
    classes.

    ``lengths`` returns the configured lengths for the request of the running task.
    ``global_steps`` is the last label that was published here: an update without a step leaves it
    as it is.
    """

    def __init__(
        self,
        engine: FakeEngine,
        verl: Verl,
        convention: ServerConvention,
        lengths: Callable[[], Lengths],
        *,
        want_routes: bool,
    ) -> None:
        self.engine = engine
        self._verl = verl
        self._convention = convention
        self._lengths = lengths
        self._want_routes = want_routes
        self._steps = engine.label

    @property
    def global_steps(self) -> Version:
        """The tag of all tokens that are sampled from now on."""
        self.note_steps()
        return self._steps

    def note_steps(self) -> None:
        """Remember the engine's label. Call it before every update, which may remove the label."""
        if self.engine.label is not None:
            self._steps = self.engine.label

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[str] | None = None,
        video_data: Sequence[str] | None = None,
        audio_data: Sequence[str] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> Any:
        """Return verl's ``TokenOutput`` of a call."""
        # the engine does not get request_id, which is random: one case has one trace
        # Ray passes a copy to the actor
        sampling = dict(sampling_params)
        # verl takes the first that is there: vLLM's name, then SGLang's
        limits = [sampling.pop(key) for key in ("max_tokens", "max_new_tokens") if key in sampling]
        want_logprobs = bool(sampling.pop("logprobs", False))
        budget = self._lengths().budget(
            limits[0] if limits else None, len(prompt_ids), self._convention.least
        )
        # only SGLang's server grants so little (`least` is 0)
        if budget < 1:
            return self._nothing(want_logprobs=want_logprobs)
        output = await self.engine.generate(
            prompt_ids=list(prompt_ids),
            max_tokens=budget,
            sampling=sampling,
            media=self._media(image=image_data, video=video_data, audio=audio_data),
            want_routes=self._want_routes,
            want_logprobs=want_logprobs,
        )
        fields = token_output_fields(
            output,
            self._convention,
            self._verl.facts,
            tag=self._tag(output),
            want_logprobs=want_logprobs,
        )
        return self._verl.token_output(**fields)

    def _media(self, **by_kind: Sequence[str] | None) -> str | None:
        """The handle of the media of a call; what is missing of them is in its text."""
        present = [kind for kind in self._convention.media if by_kind[kind]]
        missing = [kind for kind in self._convention.media if kind not in present]
        if not present:
            return None
        handle = str((by_kind[present[0]] or ("",))[0])
        return f"{handle} without its {' and '.join(missing)}" if missing else handle

    def _nothing(self, *, want_logprobs: bool) -> Any:
        """The reply if nothing may be generated: SGLang takes a budget of 0, and verl's server
        empties what it returns.
        """
        return self._verl.token_output(
            token_ids=[],
            log_probs=[] if want_logprobs else None,
            stop_reason=self._convention.stop_reason[FinishReason.LENGTH],
            extra_fields={"global_steps": self.global_steps},
        )

    async def set_global_steps(self, global_steps: int) -> None:
        """Do nothing: the engine has got its label together with the weights."""

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """Pause in mode abort; later calls wait for the resume."""
        running = [call.rid for call in self.engine.in_flight]
        await self.engine.pause(PauseMode.ABORT, reset_prefix_cache)
        return {"aborted_count": len(running), "request_ids": running}

    async def resume_generation(self) -> None:
        """Take calls again."""
        await self.engine.resume()

    async def clear_kv_cache(self) -> None:
        """Clear the prefix cache."""
        self.engine.reset_prefix_cache()

    async def release_kv_cache(self) -> None:
        """Free the memory of the cache, which takes a step; the pause has emptied it already."""
        await asyncio.sleep(self.engine.options.step)

    async def resume_kv_cache(self) -> None:
        """Allocate the memory again, which takes a step; it is empty."""
        await asyncio.sleep(self.engine.options.step)
        self.engine.reset_prefix_cache()

    def _tag(self, output: EngineOutput) -> Version:
        """The step that verl's server reads when the engine has replied: the label of its last
        token.
        """
        # The engine's reply names it: a reply that the case delays was tagged before its delay.
        current = self.global_steps
        shown = output.spans[-1].version if output.spans else output.version
        return current if shown is None or not output.token_ids else shown


def servers_of(fleet: Fleet, verl: Verl, lengths: Callable[[], Lengths]) -> dict[str, VerlServer]:
    """A server of verl's over each engine of the fleet, by id."""
    convention = CONVENTIONS[fleet.flavour.name]
    return {
        name: VerlServer(engine, verl, convention, lengths, want_routes=wants_routes(fleet))
        for name, engine in fleet.servers.items()
    }
