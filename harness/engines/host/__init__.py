"""Engine hosts: the processes that hold real engines, and how they are spoken to."""

from __future__ import annotations
