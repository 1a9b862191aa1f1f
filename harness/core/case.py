"""A case: one schedule that a fleet of fake engines runs against a subject. It is JSON.

Actions are triggered by token counts rather than by time ("when request r0 has sampled 3 tokens"),
so that a case means the same for a stack that sleeps between attempts and for one that does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from rollproof.core.engine_contract import PauseMode
from rollproof.core.json_codec import Misfit, from_json, to_json
from rollproof.core.records import Request
from rollproof.errors import CaseError

if TYPE_CHECKING:
    from rollproof.core.contract import Contract

__all__ = ["Action", "ActionKind", "Case", "EngineOptions", "Model", "Trigger"]


class ActionKind(StrEnum):
    """What an action does when it fires."""

    ABORT = "abort"
    """Abort the triggering request's call on its server, as an operator or a rate limiter would."""
    SYNC = "sync"
    """A weight update, driven by the subject: ``update_weights(next version)``."""
    SYNC_UNLABELLED = "sync-unlabelled"
    """A weight update without a label: ``update_weights(None)``."""
    SYNC_IDENTITY = "sync-identity"
    """A weight update to equal weights, under a new label."""
    SYNC_FAILS = "sync-fails"
    """A weight update whose transfer raises in the middle; then, 20 steps later, one that works."""
    SYNC_TWICE = "sync-twice"
    """Two weight updates started at once."""
    SKEW = "skew"
    """New weights reach ``server`` only; the others follow at the next sync."""
    RELABEL = "relabel"
    """Only a new label is published; the weights stay."""
    KILL = "kill"
    """``server`` dies with everything it runs; callers see an error. It revives after ``steps``;
    with 0 of them it stays dead.
    """
    LOSE_REPLY = "lose-reply"
    """The reply of the triggering call never reaches its caller; the connection errors after
    ``steps``.
    """
    DUPLICATE_REPLY = "duplicate-reply"
    """The reply of the triggering call is delivered twice (the second to any listener)."""
    LATE_REPLY = "late-reply"
    """The reply of the triggering call arrives ``steps`` later."""
    REJECT = "reject"
    """The server answers the next call of the triggering request with an abort of zero tokens."""
    EVICT = "evict"
    """The triggering request is preempted: its KV is freed, and prefilled again."""
    LAG = "lag"
    """New weights reach every server but ``server``, which keeps older ones until the next sync."""
    LEAVE = "leave"
    """``server`` leaves the balancer with its calls still running, and joins again after
    ``steps``.
    """
    DROP_ROUTES = "drop-routes"
    """The reply of the triggering call comes without routes."""
    DROP_LOGPROBS = "drop-logprobs"
    """The reply of the triggering call comes without logprobs."""
    ABORT_HANDLE = "abort-handle"
    """Abort by the handle of the triggering request's call, which ends every call that has it."""
    SYNC_MERGED = "sync-merged"
    """A weight update after which the trainer goes on with a new adapter: it has merged the old one
    into its base model.
    """
    EVICT_ADAPTERS = "evict-adapters"
    """The adapters of ``server`` make room for others: a call that names one has it loaded
    again.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Trigger:
    """When an action fires: once ``request`` has sampled ``tokens`` tokens over all its calls.

    Attributes:
        tokens: 0 means at its next admission, before that call's first token.
        queued: Fire while the call waits in the queue, before admission.
        race: Fire after the token was sampled but before the engine checks whether the call is
            finished: on the last token, the action precedes the natural end.
    """

    request: str
    tokens: int
    queued: bool = False
    race: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Something that happens to the fleet when its trigger fires."""

    when: Trigger
    do: ActionKind
    server: str | None = None
    steps: int = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The sizes of the model that the coded policy imitates; the contract's route fields follow
    from them.
    """

    num_layers: int = 3
    moe_layers: tuple[int, ...] = (0, 1, 2)
    num_experts: int = 8
    top_k: int = 2
    vocab: int = 512
    eos_every: int | None = None
    """On average one token in this many is the end-of-sequence token; ``None``: never."""
    eos_id: int = 0
    """The end-of-sequence token, below ``vocab``."""
    common_tokens: tuple[int, ...] = ()
    """Tokens below ``vocab``, one of which the policy samples at every second place on average."""
    wide_logprobs: bool = False
    """Logprobs go down to -40, and one in eight is exactly 0.0, as those of a sure model are once
    they are rounded to 32 bits; without, they lie in [-8, 0).
    """

    @classmethod
    def of_contract(cls, contract: Contract) -> Self:
        """Return a model with the sizes that a contract declares; a small one if it declares
        none.
        """
        if not contract.has_routes:
            return cls()
        return cls(
            num_layers=contract.layer_count,
            moe_layers=contract.routed_layers,
            num_experts=contract.expert_count,
            top_k=contract.choice_count,
        )

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The fields of a ``Contract`` that follow: ``Contract(**model.sizes, ...)``."""
        return {
            "num_layers": self.num_layers,
            "moe_layers": self.moe_layers,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Options of every fake engine of the fleet. Times are in virtual seconds; one engine step
    takes ``step``.
    """

    max_batch: int = 8
    step: float = 1.0
    prefill_chunk: int | None = None
    prefix_cache: bool = False
    kv_tokens: int | None = None
    """KV capacity in tokens: above it, the youngest call is preempted. ``None``: unbounded."""
    transfer_steps: int = 1
    """Steps that a transfer of weights takes."""
    pause_steps: int = 0
    """Steps until a requested pause takes effect: calls run on meanwhile."""
    max_length: int | None = None
    """Tokens of prompt and response of one call; ``None``: more than any request of the case has.
    """
    empty_text: bool = False
    """Over HTTP, a reply to a prompt of token ids has ids and no text, as where the tokens are
    special ones, or the beginning of a character.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Requests, actions, engine options and a seed: everything that determines a run, byte for
    byte. Raises ``CaseError`` on contradictions.

    Attributes:
        flavour: The conventions of the engines.
        requests: With distinct ids.
        arrivals: Virtual seconds, one per request; empty: all at 0.
        pause_mode: How the default weight sync pauses the engines.
        clear_cache: Whether the default weight sync clears their prefix caches.
        partial: Whether partial rollout is on.
        deadline: Virtual seconds after which a rollout that has not ended is reported as hung.
    """

    flavour: str
    requests: tuple[Request, ...]
    arrivals: tuple[float, ...] = ()
    actions: tuple[Action, ...] = ()
    servers: int = 1
    seed: int = 0
    pause_mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True
    partial: bool = True
    first_version: int = 0
    model: Model = field(default_factory=Model)
    engine: EngineOptions = field(default_factory=EngineOptions)
    deadline: float = 10_000.0

    def __post_init__(self) -> None:
        # a case may come from anybody's file: bounds keep a typo, or an attack, from running for
        # hours or exhausting memory
        names = [request.request_id for request in self.requests]
        if not names or len(set(names)) != len(names):
            raise CaseError(f"A case needs requests with distinct ids, not {names}.")
        # calls are attributed to requests by their prompts
        # a group (n > 1) shares its prompt on purpose
        alone = [request.prompt_ids for request in self.requests if request.group is None]
        if len(set(alone)) < len(alone):
            raise CaseError(
                "Two requests of a case share a prompt: give them the same group, or different"
                " prompts."
            )
        if self.arrivals and len(self.arrivals) != len(names):
            raise CaseError(
                f"{len(names)} requests need {len(names)} arrivals, not {len(self.arrivals)}."
            )
        # NaN compares as neither late nor early
        late = [time for time in (self.deadline, *self.arrivals) if not _is_time(time)]
        if late or not self.deadline > 0:
            raise CaseError(
                f"deadline={self.deadline!r} and arrivals={list(self.arrivals)[:9]!r} must be"
                f" virtual seconds from 0 to {_MAX_TIME:g}, the deadline above 0: beyond, a correct"
                " subject would seem to hang."
            )
        budgets = [
            (request.request_id, request.max_tokens)
            for request in self.requests
            if (request.max_tokens or 0) > _MAX_TOKENS
        ]
        if budgets:
            raise CaseError(
                f"Request {budgets[0][0]!r} asks for {budgets[0][1]} tokens; a case holds at most"
                f" {_MAX_TOKENS:,} a request."
            )
        if not _is_integer(self.servers, 1, 256):
            raise CaseError(f"servers={self.servers!r} must be a whole number from 1 to 256.")
        sizes = {
            "max_batch": (self.engine.max_batch, 1, 1 << 31),
            "prefill_chunk": (self.engine.prefill_chunk, 1, 1 << 31),
            "kv_tokens": (self.engine.kv_tokens, 1, 1 << 31),
            "transfer_steps": (self.engine.transfer_steps, 1, _MAX_STEPS),
            "max_length": (self.engine.max_length, 2, 1 << 31),
        }
        invalid = [
            f"engine.{name}={value!r}"
            for name, (value, low, high) in sizes.items()
            if value is not None and not _is_integer(value, low, high)
        ]
        if invalid or not isinstance(self.engine.step, int | float):
            problems = ", ".join(invalid) or f"engine.step={self.engine.step!r}"
            raise CaseError(f"{problems} must be a whole number of at least 1.")
        if not _is_integer(self.engine.pause_steps, 0, _MAX_STEPS):
            raise CaseError(
                f"engine.pause_steps={self.engine.pause_steps!r} must be a whole number of at"
                " least 0."
            )
        unknown = sorted({action.when.request for action in self.actions} - set(names))
        if unknown:
            raise CaseError(
                f"Actions are triggered by requests {unknown} that the case does not have."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; ``from_dict`` is its inverse."""
        data: dict[str, Any] = to_json(self, sparse=False)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote.

        Raises:
            CaseError: A field is unknown, missing or of a wrong type, or fields contradict each
                other.
        """
        try:
            return from_json(cls, to_json(data))
        except Misfit as misfit:
            if isinstance(misfit.__cause__, CaseError):
                raise misfit.__cause__ from None
            raise CaseError(f"This is not a case: {misfit}.") from misfit


def _is_time(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_TIME
    )


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


_MAX_TIME = 1e7
"""Virtual seconds that a case may last: four months."""
_MAX_TOKENS = 1 << 20
_MAX_STEPS = 1 << 20
