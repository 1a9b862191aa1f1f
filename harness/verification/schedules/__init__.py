"""Schedules: the small scope exhausted, corner cases forced, the large scope sampled, and profiles
that say how much of each.

Hypothesis is imported by ``strategies`` and ``machine`` only, which are not imported here.
"""

from __future__ import annotations

from rollproof.verification.schedules.corner_cases import corner_families
from rollproof.verification.schedules.drawing import Limits, random_cases
from rollproof.verification.schedules.exhaustive import (
    LATER_REQUEST,
    PAUSE_MODES,
    Scope,
    modes_for,
    scope_families,
    scope_size,
    small_scope,
)
from rollproof.verification.schedules.limit_cases import within_limits
from rollproof.verification.schedules.profiles import PROFILES, Profile, profile_named
from rollproof.verification.schedules.sampling_cases import with_truncated_sampling
from rollproof.verification.schedules.weight_cases import with_fitting_updates

__all__ = [
    "LATER_REQUEST",
    "PAUSE_MODES",
    "PROFILES",
    "Limits",
    "Profile",
    "Scope",
    "corner_families",
    "modes_for",
    "profile_named",
    "random_cases",
    "scope_families",
    "scope_size",
    "small_scope",
    "with_fitting_updates",
    "with_truncated_sampling",
    "within_limits",
]
