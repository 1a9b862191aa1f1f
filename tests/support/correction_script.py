"""One corrected batch, exact but for what a test changes, and what one check says of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.correction_terms import CorrectionTerms
from rollproof.core.events.corrections import Corrected, Purpose
from rollproof.core.records import FloatArray
from rollproof.core.trace import Header, Trace
from rollproof.corrections import correction_contract
from rollproof.corrections.expected_correction import ExpectedCorrection, Inputs
from rollproof.corrections.expected_loss import ExpectedLoss
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult
from rollproof.verification.traces import judge

__all__ = ["SHAPE", "Batch"]

SHAPE = (3, 5)
"""Three sequences of five tokens."""


class Batch:
    """A batch with different logprobs everywhere.

    ``inputs`` overrides its inputs, ``terms`` are those of the correction. ``weights``, ``kept``
    and ``gradient`` are the exact results, which a test may change.
    """

    def __init__(self, inputs: dict[str, Any] | None = None, **terms: Any) -> None:
        draw = np.random.default_rng(5)
        rollout = -draw.uniform(0.5, 2.0, SHAPE)
        fields: dict[str, Any] = {
            "rollout": rollout,
            "old": rollout + draw.uniform(0.1, 0.6, SHAPE),
            "current": rollout - draw.uniform(0.1, 0.6, SHAPE),
            "mask": np.ones(SHAPE, dtype=np.int64),
            "advantages": draw.uniform(0.5, 1.5, SHAPE),
            "groups": np.zeros(SHAPE[0], dtype=np.int64),
            "versions": np.zeros(SHAPE, dtype=np.int64),
            **(inputs or {}),
        }
        self.contract = correction_contract(**terms)
        assert isinstance(self.contract.correction, CorrectionTerms)
        arrays: dict[str, Any] = {name: np.array(value) for name, value in fields.items()}
        self.inputs = Inputs(**arrays)
        self.exact = ExpectedCorrection(self.contract.correction, self.inputs)
        self.weights: FloatArray = self.exact.weights.value.copy()
        self.kept: FloatArray = self.exact.kept.astype(np.float64)

    def gradient(self) -> FloatArray:
        """The exact gradient of the loss."""
        gradient = ExpectedLoss(self.exact).gradient
        assert gradient is not None
        return gradient.value.copy()

    def judged(self, check_id: str, purpose: Purpose, **fields: Any) -> CheckResult:
        """What a check says of the batch, in a situation, with these results."""
        batch = self.inputs
        event = Corrected(
            name="by hand",
            purpose=purpose,
            rollout=batch.rollout,
            old=batch.old,
            current=batch.current,
            mask=batch.mask,
            advantages=batch.advantages,
            groups=batch.groups,
            versions=batch.versions,
            **{"weights": self.weights, **fields},
        )
        header = Header(subject="by hand", contract=self.contract, about="corrections")
        trace = Trace(header=header, events=()).with_events([event])
        return judge(trace, default_registry().select([check_id]))[check_id]
