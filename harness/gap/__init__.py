"""The gap: how far a trainer's logprobs of a rollout are from those of the engine that sampled it.

``measure(rollout_logprob, trainer_logprob, sequence_id=..., mask=...)`` gives every metric with
intervals over sequences, a verdict against limits that quote their source, and the kind of cause
that the pattern points to. ``measure_rollouts(rollouts, trainer)`` scores them first, each token
under the weights that sampled it; ``localise(first, second, input_ids)`` names the module where two
models part.
"""

from __future__ import annotations

from rollproof.core.extras import require_extra

require_extra("gap", "The metrics of the gap")

from rollproof.gap.gap_report import GapReport, gap_lines
from rollproof.gap.limits import GapVerdict, Limit, Limits, limits_named
from rollproof.gap.localise.localisation import Localisation
from rollproof.gap.localise.localise import localise
from rollproof.gap.measure import measure, measure_pairs, measure_rollouts
from rollproof.gap.scored_rollouts import GapTrainer, Scored, score_rollouts
from rollproof.gap.token_pairs import COLUMNS, TokenPairs

__all__ = [
    "COLUMNS",
    "GapReport",
    "GapTrainer",
    "GapVerdict",
    "Limit",
    "Limits",
    "Localisation",
    "Scored",
    "TokenPairs",
    "gap_lines",
    "limits_named",
    "localise",
    "measure",
    "measure_pairs",
    "measure_rollouts",
    "score_rollouts",
]
