"""Which requests a recording has, and what of their tokens it shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rollproof.core.engine_contract import LARGEST_TOKEN
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Chunk, Observation, Reply, Result, Submit
from rollproof.core.events.training import Batch
from rollproof.core.records import Rollout
from rollproof.errors import UsageError

__all__ = ["DROPPED_TOKENS", "Redaction", "RequestSample"]

DROPPED_TOKENS = "its token ids were left out of the recording (redact='drop')"
# the largest vocabularies of today's models have about as many tokens
_MAX_CACHE = 1 << 18
_R = TypeVar("_R", bound=Any)


@dataclass(frozen=True, slots=True)
class RequestSample:
    """A share of all requests, chosen by a hash of the id: on every host the same ones.

    Attributes:
        rate: the share, above 0 and up to 1.
        seed: another one chooses other requests.
    """

    rate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        rate: object = self.rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise UsageError(
                f"sample={rate!r} must be a share of the requests: above 0, and at most 1."
            )

    def has(self, request_id: str) -> bool:
        """Return whether the request of that id is recorded."""
        if self.rate >= 1:
            return True
        # not hash(): Python salts it, so that each process would choose other requests
        digest = hashlib.blake2b(f"{self.seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.rate * 2.0**64


class Redaction:
    """Replaces token ids in events; logprobs, routes and lengths stay.

    Args:
        mode: ``"none"``, ``"drop"`` (each id becomes 0, and no request is judged), or
            ``"hash:KEY"``: an id becomes a number that only ``KEY`` determines. Equal ids stay
            equal, so that most is judged as before. Whoever has the text of some samples can
            guess the rest from how often a number occurs: it hides tokens from a glance, not from
            an attacker.

    Raises:
        UsageError: it is none of them.
    """

    def __init__(self, mode: str = "none") -> None:
        kind, _, key = mode.partition(":") if isinstance(mode, str) else ("", "", "")
        if kind not in ("none", "drop", "hash") or (kind == "hash") != bool(key):
            raise UsageError(
                "redact must be 'none', 'drop', or 'hash:KEY' with a key of your own, not"
                f" {mode if kind != 'hash' else 'hash'!r}."
            )
        self.drops: bool = kind == "drop"
        self._is_off = kind == "none"
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()
        self._known: dict[int, int] = {}

    def token(self, token: int) -> int:
        """Return what stands for one token."""
        if self._is_off:
            return token
        if self.drops:
            return 0
        known = self._known.get(token)
        if known is None:
            text = str(token).encode()
            digest = hashlib.blake2b(text, key=self._key, digest_size=8).digest()
            # 31 bits: of 200,000 ids about ten pairs get one number
            known = int.from_bytes(digest, "big") % (LARGEST_TOKEN + 1)
            if len(self._known) < _MAX_CACHE:
                self._known[token] = known
        return known

    def tokens(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Return what stands for some tokens."""
        return tuple(map(self.token, tokens))

    def event(self, event: Event) -> Event:
        """Return the event as it may be written."""
        if self._is_off:
            return event
        if isinstance(event, Submit):
            turns = tuple(self.tokens(turn) for turn in event.request.turns)
            request = replace(event.request, turns=turns, media=self._text(event.request.media))
            return replace(event, request=self._with(request, "prompt_ids"))
        if isinstance(event, Call):
            end = None if event.end_tokens is None else self.tokens(event.end_tokens)
            call = replace(event, end_tokens=end, media=self._text(event.media))
            return self._with(call, "prompt_ids", "stop_token_ids", "stop_string_tokens")
        if isinstance(event, Reply):
            return replace(event, output=self._with(event.output, "token_ids"))
        if isinstance(event, Observation | Chunk):
            return self._with(event, "token_ids")
        if isinstance(event, Result):
            # what stands behind the colon may quote the prompt
            error = None if event.error is None else event.error.partition(":")[0]
            samples = [self._sample(sample) for sample in event.samples]
            rollout = samples.pop() if event.rollout is not None else None
            return replace(event, rollout=rollout, earlier=tuple(samples), error=error)
        if isinstance(event, Batch):
            return self._batch(event)
        return event

    def _batch(self, event: Batch) -> Batch:
        samples = tuple(self._sample(sample) for sample in event.samples)
        rows = []
        for row in event.rows:
            ids = np.array(self.tokens(row.token_ids.tolist()), dtype=np.int64)
            rows.append(replace(row, token_ids=ids))
        return replace(event, samples=samples, rows=tuple(rows))

    def _sample(self, sample: Rollout) -> Rollout:
        return replace(self._with(sample, "prompt_ids", "response_ids"), extra={})

    def _with(self, record: _R, *names: str) -> _R:
        changed: dict[str, Any] = {name: self.tokens(getattr(record, name)) for name in names}
        return replace(record, **changed)

    def _text(self, text: str | None) -> str | None:
        if text is None:
            return None
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=8).hexdigest()
