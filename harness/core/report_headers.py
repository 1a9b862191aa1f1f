"""Headers by which a client says for which of its requests it makes a call."""

from __future__ import annotations

__all__ = ["INTERNAL", "OWNER_HEADER", "ROLLOUT_HEADER"]

OWNER_HEADER = "x-rollproof-request"
"""Names the request of a call: an id that the client has submitted."""
ROLLOUT_HEADER = "x-rollproof-rollout"
"""Names the rollout in which a call is made, by any text of its own
(``rollproof.http_clients``). Its first call opens a request with the prompt of that call.
"""
INTERNAL = "none"
"""In place of the name of a rollout: the call belongs to no request."""
