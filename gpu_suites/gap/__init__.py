"""The gap between real engines and real trainers: rollouts, scorers and the matrix of both."""

from __future__ import annotations
