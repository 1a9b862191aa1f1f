"""Recording: a trace of code that already runs, around an existing test or loop."""

from __future__ import annotations
