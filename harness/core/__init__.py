"""Core: the records, contracts and events that every other layer speaks. Imports numpy and the
standard library only.
"""

from __future__ import annotations
