"""The names of the situations that are counted."""

from __future__ import annotations

from rollproof.core.engine_contract import PauseMode

__all__ = ["FAULTS", "LIMITS", "PLACES", "SITUATIONS"]

FAULTS = {
    "lost-reply": "lost replies",
    "late-reply": "late replies",
    "broken-stream": "streams that may not have been read to their end",
    "duplicate-reply": "duplicate replies",
    "reject": "rejected calls",
    "death": "server deaths",
    "revive": "server revivals",
    "update-hung": "weight updates that hung",
    "leave": "replicas that left the balancer",
    "join": "replicas that joined the balancer again",
}
"""The situation of each kind of ``Fault``."""
LIMITS = ("response", "length", "context", "turns", "turn_tokens", "answer")
"""The limits of a ``RolloutLimits`` that requests come near."""
PLACES = {-1: "one below", 0: "at", 1: "one above"}
"""How a size that is one less, equal or one more than a limit is called."""
SITUATIONS = frozenset(
    (
        "requests",
        "requests in parallel with others",
        "requests aborted twice or more",
        "requests aborted three times in a row without a token",
        "requests dropped",
        "requests that hung",
        "requests that ended with an error",
        "multi-turn rollouts",
        "rollouts across two or more updates",
        "engine calls",
        "calls across a weight version",
        "calls frozen by a pause",
        "calls lost with their server",
        "calls while replicas were out of step",
        "events that were not recorded",
        "preemptions",
        "prefills again after a pause",
        "prefix-cache hits",
        "tokens sampled",
        "route rows",
        "zero-token segments",
        "resumes",
        "resumes across a weight version",
        "aborts before the first token",
        "aborts before the first token of a later turn",
        "aborts while queued",
        "aborts on the last token",
        "aborts mid-decode",
        "aborts of nothing in flight",
        "ends of sequence on the last token",
        "ends of sequence before the budget",
        "budgets exhausted",
        "natural ends",
        "labels published without weights",
        "weight updates while idle",
        "weight updates while calls ran",
        "weight updates between calls",
        "weight updates without a label",
        "identity updates",
        "failed weight updates",
        "starts from a later weight version",
        "logprobs below -32",
        "logprobs of exactly 0",
        "prompts with the end token inside",
        "responses with the end token inside",
        "64 requests at once",
        "requests aborted more than ten times",
        "weight transfers of several steps",
        "pauses that take effect later",
        "calls on a replica with older weights",
        "resumes under older weights",
        "replies without routes",
        "replies without logprobs",
        "calls after a reply without routes",
        "calls after a reply without logprobs",
        "turns cut with answers left",
        "answers of the environment after a cut turn",
        "replies without text over HTTP",
        "requests with top-p, top-k, min-p or penalties",
        "equal requests of a group",
        "replies with a stop sequence of the stack's own",
        "samples in batches",
        "samples in batches with the padding token inside",
        "broken weight transfers",
        *(f"{name} limit, {place}" for name in LIMITS for place in PLACES.values()),
        *FAULTS.values(),
        *(f"pauses, mode {mode}" for mode in PauseMode),
    )
)
"""The names of all situations of rollouts and batches that are counted."""
