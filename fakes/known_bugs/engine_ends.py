"""Known bugs of engines near the ends of calls, and of sampling parameters, each on the fake engine
in the experiment that shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollproof.core.contract import Logprobs
from rollproof.core.engine_protocol import Query
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.fakes.engine.engine_subject import FakeEngineSubject, coded_modes, stripped
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _EndTokenStripped(FakeEngineSubject):
    """Removes what ended the call from the tokens, as if they were text."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        output = super().shown(output, query)
        return stripped(output) if output.finish_reason is FinishReason.STOP else output


class _StopTokenUnknown(FakeEngineSubject):
    """Knows the model's own end token, and drops the call's stop tokens."""

    def ends(self, query: Query) -> frozenset[int]:
        return super().ends(replace(query, stop_token_ids=(), stop=()))


class _LastPlacesGarbled(FakeEngineSubject):
    """Reads the logprobs of the last places of the context from a buffer that is too short."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        output = super().shown(output, query)
        if output.logprobs is None:
            return output
        logprobs = output.logprobs.copy()
        first = max(0, self.settings.max_length - 4 - len(query.prompt_ids))
        logprobs[first:] = -0.25
        return replace(output, logprobs=logprobs)


class _BeyondTheContext(FakeEngineSubject):
    """Takes the whole budget of a call, whatever the context leaves."""

    def granted(self, query: Query) -> int:
        granted = super().granted(query)
        # the fake engine below ends at the context, so the excess is asked of a longer one
        self.engine.max_length = self.settings.max_length + 16
        return max(granted, query.max_tokens)


class _TopKIgnored(FakeEngineSubject):
    """Samples from all tokens: the option does not reach the sampler of a batch."""

    def draws(self, query: Query) -> Sequence[int]:
        # another draw than the one that the coded policy leaves
        first = 1 if any(not option.penalty for option in query.sampling) else 0
        return range(first, first + query.samples)


class _RenormalisedLogprobs(FakeEngineSubject):
    """Returns logprobs of the tokens that top-p left, although it declares another mode."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        cut = any(not option.penalty for option in query.sampling)
        if output.logprobs is None or not cut:
            return super().shown(output, query)
        modes = coded_modes(output.logprobs, query.temperature, query.sampling, penalised=False)
        return replace(output, logprobs=modes[Logprobs.PROCESSED])


class _SamplesDrawnAlike(FakeEngineSubject):
    """Gives every sample of a call the seed of the call."""

    def draws(self, query: Query) -> Sequence[int]:
        return [0] * query.samples


class _LogprobOfNoToken(FakeEngineSubject):
    """Without a budget the token that closes the prefill is dropped, and its logprob is not."""

    def shown(self, output: EngineOutput, query: Query) -> EngineOutput:
        output = super().shown(output, query)
        if query.max_tokens or output.logprobs is None:
            return output
        return replace(output, logprobs=np.array([-1.25]))


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="end-token-stripped",
        summary="The token that ended a call is missing from the token ids of its reply.",
        refs=("dynamo#14302", "cf. verl#2727"),
        kind="engines",
        make=_EndTokenStripped,
        only=("ends", "stops"),
        detected_by=("engine.ends",),
    ),
    KnownBug(
        id="stop-token-unknown",
        summary="A call goes on after a token that should end it: the engine knows one end token.",
        refs=("vLLM#4180", "cf. vLLM#4182"),
        kind="engines",
        make=_StopTokenUnknown,
        only=("stops",),
        detected_by=("engine.ends",),
    ),
    KnownBug(
        id="last-places-garbled",
        summary="Logprobs are wrong in the last places before the model's length.",
        refs=("cf. lm-evaluation-harness#3134",),
        kind="engines",
        make=_LastPlacesGarbled,
        only=("limit",),
        detected_by=("engine.logprobs",),
    ),
    KnownBug(
        id="beyond-the-context",
        summary="A call whose budget exceeds the context is sampled beyond it.",
        refs=("lm-evaluation-harness#3134",),
        kind="engines",
        make=_BeyondTheContext,
        only=("limit",),
        detected_by=("engine.length",),
    ),
    KnownBug(
        id="top-k-ignored",
        summary="A call's top-k, top-p or min-p does not reach the sampler of a batch.",
        refs=("mlx-vlm#1353", "cf. vLLM#2754"),
        kind="engines",
        make=_TopKIgnored,
        only=("sampling",),
        detected_by=("engine.sampling",),
    ),
    KnownBug(
        id="renormalised-logprobs",
        summary=(
            "Logprobs are renormalised over the tokens that top-p leaves, although the engine"
            " declares those of the whole distribution."
        ),
        refs=("SGLang#5961", "trl#6789", "cf. vLLM#42259"),
        kind="engines",
        make=_RenormalisedLogprobs,
        only=("sampling",),
        detected_by=("engine.logprob-mode",),
    ),
    KnownBug(
        id="samples-drawn-alike",
        summary="The samples of one call are identical: each uses the seed of the call.",
        refs=("vLLM#10852", "cf. mlx-vlm#1818"),
        kind="engines",
        make=_SamplesDrawnAlike,
        only=("samples",),
        detected_by=("engine.samples",),
    ),
    KnownBug(
        id="logprob-of-no-token",
        summary="The reply to a call without a budget has a logprob, and no token.",
        refs=("SGLang 0.5.21 (docs/engines.md)", "SGLang#20799", "cf. SGLang#20964"),
        kind="engines",
        make=_LogprobOfNoToken,
        only=("refusals",),
        flavour="sglang",
        detected_by=("stitch.logprobs-length",),
    ),
)
