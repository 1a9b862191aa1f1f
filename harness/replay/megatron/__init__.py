"""megatron-core's routing replay: its real routers, dispatchers and schedules, on a CPU or GPUs.

``cuda_stand_in`` replaces megatron-core's CUDA calls, ``megatron_setups`` has the judged
configurations, ``megatron_model`` and ``model_weights`` build one rank's part of a tiny GPT,
``rank_worker`` is one rank of the trainer, ``rank_step`` a step on it, and ``megatron_trainer`` the
trainer under test.
``plain_model`` is the same model without megatron-core. Importing any of them imports neither torch
nor megatron-core.
"""

from __future__ import annotations
