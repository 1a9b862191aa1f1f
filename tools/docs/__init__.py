"""The generators of the pages in docs/."""

from __future__ import annotations
