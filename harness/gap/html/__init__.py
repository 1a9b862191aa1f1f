"""The HTML page of a gap's report, and its plots (extra ``report``)."""

from __future__ import annotations
