"""Events: what a trace is made of, one module for each kind of subject."""

from __future__ import annotations
