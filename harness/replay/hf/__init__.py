"""Routing replay for models of HF transformers: ``hf_replay`` and ``hf_record`` for a training loop of one's own.

``topk`` is the oracle: it puts ids in the place of a router's own top-k, whatever the family computes around it. ``routers`` finds the
routers of a model by structure, ``targets`` checks the routes that are to be replayed, ``passes`` holds the context managers, and
``subject`` is the trainer that rollproof's own suite drives. All but this module import torch.
"""

from __future__ import annotations
