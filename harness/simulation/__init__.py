"""Simulation: the virtual clock, the network in memory, and the guards around the code under test."""

from __future__ import annotations
