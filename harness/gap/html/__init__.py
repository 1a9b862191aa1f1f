"""HTML: the page and the plots of a gap report."""

from __future__ import annotations
