"""Report: what a session of the GPU suites found, as JSON and as a page."""

from __future__ import annotations
