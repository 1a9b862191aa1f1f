"""megatron-core's routing replay on the CPU: its real routers, dispatchers and schedules, driven as
a trainer drives them.

``standin`` replaces megatron-core's CUDA calls, ``setups`` are the judged configurations, ``model``
and ``weights`` build one rank's part of a tiny GPT, ``worker`` is one rank of the trainer and
``subject`` the trainer as rollproof judges it; ``plain`` is the same model without megatron-core.
Importing any of them imports neither torch nor megatron-core.
"""

from __future__ import annotations
