"""Excused: by how much results differ in a finding, so that what was seen once is excused within what was seen."""

from __future__ import annotations

from rollproof.checks import Finding

__all__ = ["loss_apart"]


def loss_apart(finding: Finding) -> float:
    """By how much two losses differ, relative to the larger; infinite where the finding is of something else."""
    if not finding.expected.startswith("the loss of step "):
        return float("inf")
    one, other = (float(text) for text in (finding.expected.rpartition(": ")[2], finding.observed.partition(";")[0]))
    return abs(one - other) / max(abs(one), abs(other))
