"""The report of a session of the GPU suites, as JSON and as a page."""

from __future__ import annotations
