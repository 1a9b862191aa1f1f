"""The events of a trace, one module for each kind of subject."""

from __future__ import annotations
