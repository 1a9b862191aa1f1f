"""Replay: routing replay in a trainer, driven step by step and judged by what its routers really
chose.

``terms`` is what a trainer declares, ``events`` what a run of it records, ``spy`` what an adapter
tells, ``plans`` what is asked of it, ``driving`` asks, ``judging`` judges. ``layouts`` holds the
transformations between payload and router rows.
"""

from __future__ import annotations
