"""Programs that write parts of docs/ and run what is not shipped in the wheel."""

from __future__ import annotations
