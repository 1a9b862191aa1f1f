"""Routing replay for models of HF transformers, for your own training loop.

``hf_replay`` replays a microbatch, ``hf_record`` records one, ``batch_routes`` and
``packed_routes`` bring the routes of finished samples into the order of the model's rows,
``find_routers`` saves the search in a loop, and ``watched`` reports to rollproof's spy what really
ran. Needs torch.

Private modules: ``topk`` replaces a router's own top-k, whatever its family computes around it;
``passes`` has the contexts, ``target_routes`` checks their routes; ``hf_replay_trainer`` and
``ranked_trainer`` are replay subjects around tiny models.
"""

from __future__ import annotations

from importlib.util import find_spec

from rollproof.errors import StackError

if find_spec("torch") is None:
    raise StackError(
        "rollproof.replay.hf replays models of PyTorch, and torch is not installed: `pip install"
        " torch transformers`."
    )

from rollproof.replay.hf.passes import Pass, Recorded, hf_record, hf_replay
from rollproof.replay.hf.route_placement import batch_routes, packed_routes
from rollproof.replay.hf.router_watch import watched
from rollproof.replay.hf.routers import Router, Routers, find_routers

__all__ = [
    "Pass",
    "Recorded",
    "Router",
    "Routers",
    "batch_routes",
    "find_routers",
    "hf_record",
    "hf_replay",
    "packed_routes",
    "watched",
]
