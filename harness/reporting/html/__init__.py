"""HTML pages: what they share, and the drawing of a trace (extra ``report``)."""

from __future__ import annotations
