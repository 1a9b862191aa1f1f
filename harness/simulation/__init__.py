"""The virtual clock, the network in memory, and guards for the code under test."""

from __future__ import annotations
