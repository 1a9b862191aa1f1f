"""What the checks of several families share."""

from __future__ import annotations
