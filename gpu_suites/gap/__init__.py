"""Gap: rollouts of real engines scored by real trainers, with and without replay."""

from __future__ import annotations
