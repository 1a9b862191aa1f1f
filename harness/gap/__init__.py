"""Gap: how far the trainer's logprobs of a rollout are from those of the engine that sampled it.

``measure(rollout_logprob, trainer_logprob, sequence_id=..., mask=...)`` gives the whole panel with intervals over sequences, a
verdict against limits that quote their source, and what kind of cause the pattern points to.
"""

from __future__ import annotations

from rollproof.gap.limits import GapVerdict, Limit, Limits, limits_named
from rollproof.gap.measuring import measure, measure_pairs
from rollproof.gap.pairs import COLUMNS, TokenPairs
from rollproof.gap.report import GapReport, gap_lines

__all__ = ["COLUMNS", "GapReport", "GapVerdict", "Limit", "Limits", "TokenPairs", "gap_lines", "limits_named", "measure", "measure_pairs"]
