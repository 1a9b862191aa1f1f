"""The conventions in which subjects differ: the values of a contract's fields."""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "Adapters",
    "Deltas",
    "Filler",
    "KvPolicy",
    "LayerAxis",
    "Logprobs",
    "MaskedTokens",
    "MissingLogprobs",
    "PartialOff",
    "Provenance",
    "ResumeBy",
    "Rows",
    "Samples",
    "Sampling",
    "TagRead",
    "Versions",
]


class Rows(StrEnum):
    """How many route rows a sample of T = prompt_len + response_len tokens carries."""

    ALL = "T"
    """One row per token; the row of the last sampled token, which was never forwarded, is
    ``final_row`` filler.
    """
    FORWARDED = "T-1"
    """One row per forwarded token: what vLLM and SGLang return."""
    CAPTURED_PREFIX = "captured-prefix"
    """Rows 0 to n-1 for some n <= T: a captured prefix, the rest absent (SkyRL)."""
    NONE = "none"
    """The subject returns no routes."""


class Filler(StrEnum):
    """The content of a row that no forward captured."""

    NONE = "none"
    """There is no such row."""
    MINUS_ONE = "minus-one"
    """-1, top_k times: no expert's id."""
    ARANGE = "arange"
    """0 to top_k-1: legal, distinct ids (NeMo-RL)."""
    ZEROS = "zeros"
    """Expert 0, top_k times: a legal id, so a trainer replays it. Allowed, and flagged."""
    PREVIOUS = "previous"
    """The row before it, once more: legal, distinct ids (verifiers)."""


class LayerAxis(StrEnum):
    """Which layers the second axis of ``routes`` counts."""

    ALL = "all"
    """Every hidden layer, so ``num_layers`` columns; those of dense layers hold no capture (vLLM,
    SGLang).
    """
    MOE = "moe"
    """MoE layers only, in order, so ``len(moe_layers)`` columns."""


class ResumeBy(StrEnum):
    """Who continues a request after an abort or a pause."""

    CLIENT = "client"
    """The stack calls an engine again, with the prompt and the tokens that it has (verl, AReaL)."""
    ENGINE = "engine"
    """The engine: a pause freezes its calls, and they go on afterwards (SkyRL, prime-rl)."""
    NONE = "none"
    """Nobody: an aborted sample is over."""


class Provenance(StrEnum):
    """Which forward a row of a resumed sample comes from."""

    AS_SAMPLED = "as-sampled"
    """A row keeps the version of the forward that first computed it (behaviour policy). The row of
    the last token of a segment is computed by the next segment: row version = version of the token
    that the row's forward predicted."""
    LATEST_PREFILL = "latest-prefill"
    """All rows come from the last call, which prefilled the complete sequence again."""


class Versions(StrEnum):
    """The finest weight-version tag that a sample carries."""

    NONE = "none"
    """A sample carries no version."""
    SAMPLE = "sample"
    """One for all tokens of the sample (TRL)."""
    MIN_MAX = "min-max"
    """The lowest and the highest of those that sampled its tokens (verl)."""
    BOUNDS = "bounds"
    """A minimum and a maximum that enclose the versions that sampled the tokens, and may be wider:
    counters of the trainer's side, read when the rollout began and when it ended (prime-rl's
    ``PolicySpan``)."""
    CALL = "call"
    """One for each engine call that sampled tokens (slime)."""
    SPAN = "span"
    """One for each run of tokens that the same weights sampled."""
    TOKEN = "token"
    """One for each response token (AReaL)."""


class Samples(StrEnum):
    """How many samples a request delivers, and what each of them holds."""

    REQUEST = "request"
    """One: everything that was sampled for the request."""
    TURN = "turn"
    """One for each turn of the model (step-wise): its prompt is what the turn's first call sent,
    its response what the turn sampled."""
    BRANCH = "branch"
    """Any number: each holds tokens that calls sampled after exactly the tokens that they read
    (turns merged as long as the history only grew, sub-agents, best of n)."""


class TagRead(StrEnum):
    """When an engine reads the one label that it shows with a reply."""

    ADMISSION = "admission"
    """When the call was admitted (vLLM): it may name weights that sampled no token."""
    EMISSION = "emission"
    """When the reply was made (SGLang, verl's servers): wrong if an update came in between."""


class Logprobs(StrEnum):
    """The probability whose logarithm a rollout logprob is."""

    NONE = "none"
    """Samples carry no logprobs."""
    RAW = "raw"
    """The token's probability by the logits before the temperature, among all tokens (vLLM's
    ``raw_logprobs``, its default).
    """
    TEMPERATURE_SCALED = "temperature-scaled"
    """The probability by the logits divided by the temperature, among all tokens (SGLang's
    default).
    """
    PROCESSED = "processed"
    """The probability with which the token was drawn: after temperature, penalties, top_k, top_p
    and min_p (vLLM's ``processed_logprobs``).
    """


class MissingLogprobs(StrEnum):
    """How a subject marks a token whose logprob the engine did not return."""

    NEVER = "never"
    """The engine always returns one: a missing value is a fault."""
    NAN = "nan"
    """The position holds NaN (``None`` in the native form)."""
    MASKED = "masked"
    """The position holds anything, and its loss mask is 0."""


class MaskedTokens(StrEnum):
    """Sampled tokens that a stack leaves out of the loss on purpose (loss mask 0)."""

    OLDER_WEIGHTS = "older-weights"
    """Tokens of weights that are older than those at the sample's end or at its delivery."""
    EARLIER_CALLS = "earlier-calls"
    """Everything sampled before the last call that resumed the sample (slime's and miles'
    ``mask_offpolicy_in_partial_rollout``).
    """
    TRUNCATED = "truncated"
    """All tokens of a sample that no natural end closed (DAPO's overlong filtering)."""
    ABORTED = "aborted"
    """All tokens of a sample that ended by an abort or an error, or of a turn that an abort cut."""
    END = "end"
    """The token with which a turn ended naturally."""
    ANY = "any"
    """Any token: the mask of sampled tokens is not judged."""


class Sampling(StrEnum):
    """The sampling parameters (temperature, top_p, ...) with which the engines are called."""

    FORWARDED = "forwarded"
    """The caller's, ``Request.sampling``, under the names that the caller gave."""
    OWN = "own"
    """The stack's own, or the caller's in a form of the stack's own."""


class KvPolicy(StrEnum):
    """The treatment of the KV cache of older weights at a weight update."""

    RECOMPUTE = "recompute"
    """It is not used again: what is resumed is prefilled by the new weights (verl)."""
    # the logprobs are then of no policy: on vLLM they were 4 nats from those of either weights
    KEEP = "keep"
    """Later tokens attend to it: calls go on across an update with the KV that they have (SkyRL,
    prime-rl).
    """


class PartialOff(StrEnum):
    """What happens to an aborted sample when partial rollout is off."""

    DROPPED = "dropped"
    """The rollout returns nothing."""
    SURFACED = "surfaced"
    """The rollout returns it with finish reason ``abort``."""


class Adapters(StrEnum):
    """Whether the base model changes under the adapters (LoRA) that updates bring."""

    FROZEN_BASE = "frozen-base"
    """The base model stays as it is: every update brings an adapter."""
    MOVING_BASE = "moving-base"
    """The trainer may merge its adapter into the base model and go on with a new one: such an
    update brings the base model.
    """


class Deltas(StrEnum):
    """What a delta does to the tensors of an engine."""

    OVERWRITE = "overwrite"
    """It has new values, so applying it again changes nothing (verl's ``delta_sharded``, TRL)."""
    ADD = "add"
    """It has differences (sums, XOR), so it may be applied once only (SkyRL, miles)."""
