"""The inputs of every family of corner cases, and what the families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rollproof.core.case import Action, ActionKind, Case, Model, Trigger
from rollproof.core.contract import Contract, ResumeBy
from rollproof.core.engine_contract import LARGEST_TOKEN, PauseMode
from rollproof.core.limits import RolloutLimits
from rollproof.core.records import Request
from rollproof.fakes.coded.policy import CodedPolicy

__all__ = [
    "ANSWERS",
    "PROMPT",
    "Corner",
    "Family",
    "act",
    "some_tokens",
    "until_end",
    "vocab_with",
    "with_stop",
]

PROMPT = (11, 12)
ANSWERS = ((201, 202), (203,))


@dataclass(frozen=True, slots=True)
class Corner:
    """The inputs of every family."""

    flavour: str
    contract: Contract
    model: Model
    seed: int
    mode: PauseMode

    @property
    def limits(self) -> RolloutLimits:
        return self.contract.limits or RolloutLimits()

    @property
    def aborts_end(self) -> bool:
        """Whether an aborted call ends its request for good."""
        resume = self.contract.resume
        return resume is ResumeBy.NONE or (
            resume is ResumeBy.ENGINE and self.contract.abort_surfaces
        )

    @property
    def budget(self) -> int:
        """Tokens that a request samples, unless its family says otherwise."""
        limits, total = self.limits, self.limits.total
        room = None if total is None else total - len(PROMPT)
        bounds = (6, limits.response, limits.turn_tokens, room)
        return max(1, min(bound for bound in bounds if bound is not None))

    def case(
        self,
        *actions: Action,
        prompt: tuple[int, ...] = PROMPT,
        budget: int | None = None,
        turns: tuple[tuple[int, ...], ...] = (),
        **changes: Any,
    ) -> Case:
        """Return a case of one request, unless ``changes`` replaces the requests."""
        request = Request(
            request_id="r0", prompt_ids=prompt, max_tokens=budget or self.budget, turns=turns
        )
        fields: dict[str, Any] = {
            "flavour": self.flavour,
            "requests": (request,),
            "actions": actions,
            "seed": self.seed,
            "pause_mode": self.mode,
            # calls paused in place keep their KV cache, and SGLang fails if it is flushed then
            "clear_cache": self.mode is not PauseMode.IN_PLACE,
            "model": self.model,
        }
        return Case(**{**fields, **changes})

    def seed_where(
        self,
        model: Model,
        fits: Callable[[tuple[int, ...], tuple[float, ...]], bool],
        prompt: tuple[int, ...] = PROMPT,
    ) -> int | None:
        """Return the first seed under which a request that nothing interrupts fits, given its
        tokens and their logprobs; ``None`` if a thousand seeds have none.
        """
        for seed in range(self.seed, self.seed + 1000):
            policy = CodedPolicy.from_model(model, seed)
            state = policy.start_state(prompt)
            tokens: list[int] = []
            while len(tokens) < self.budget and (
                policy.eos_every is None or policy.eos_id not in tokens
            ):
                tokens.append(policy.next_token(0, state))
                state = policy.extend(state, tokens[-1])
            logprobs = policy.logprobs(0, (*prompt, *tokens), len(prompt)).tolist()
            if fits(tuple(tokens), tuple(logprobs)):
                return seed
        return None


Family: TypeAlias = "Callable[[Corner], Iterator[Case]]"


def act(kind: ActionKind, tokens: int, request: str = "r0", **fields: Any) -> Action:
    """Return an action that is triggered once ``request`` has ``tokens`` tokens.

    ``queued`` is a field of the trigger, other ``fields`` are those of the action.
    """
    queued = fields.pop("queued", False)
    return Action(when=Trigger(request=request, tokens=tokens, queued=queued), do=kind, **fields)


def vocab_with(model: Model, end: int) -> int:
    """Return the size of a vocabulary with the end token ``end`` and many others."""
    return max(model.vocab, min(end + 512, LARGEST_TOKEN + 1))


def with_stop(model: Model, sequence: tuple[int, ...]) -> Model:
    """Return the model with the tokens of a stop sequence among those that it samples often."""
    end = model.eos_id
    if end in sequence and model.eos_every is None:
        # it is never sampled as an end, and any other token may have its place
        end = max(sequence) + 1 if max(sequence) < LARGEST_TOKEN else _unused(sequence)
    common = tuple(token for token in dict.fromkeys(sequence) if token != end)
    vocab = vocab_with(model, max(*sequence, end))
    return replace(model, common_tokens=common, eos_id=end, vocab=vocab)


def _unused(sequence: tuple[int, ...]) -> int:
    return next(token for token in range(len(sequence) + 1) if token not in sequence)


def some_tokens(count: int) -> tuple[int, ...]:
    """Return tokens that differ from their neighbours, none of them a usual padding token."""
    # 389 is a prime: no token returns before all the others were there
    return tuple(11 + 7 * i % 389 for i in range(count))


def until_end(policy: CodedPolicy, context: tuple[int, ...], most: int) -> tuple[int, ...] | None:
    """Return the turn that follows ``context``; ``None`` if it has more than ``most`` tokens."""
    state = policy.start_state(context)
    tokens: list[int] = []
    while len(tokens) < most:
        tokens.append(policy.next_token(0, state))
        if tokens[-1] == policy.eos_id:
            return tuple(tokens)
        state = policy.extend(state, tokens[-1])
    return None
