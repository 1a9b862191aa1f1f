"""Routing replay in a trainer: driven step by step, judged by what its routers really chose.

Public: ``terms`` and ``contract`` (what a trainer declares), ``events`` (what a run records),
``spy`` (what an adapter reports), ``layouts`` (payload and router rows). ``plans`` has the steps
that a trainer runs, ``driver`` runs and records them. ``hf`` and ``megatron`` are trainers.
"""

from __future__ import annotations
