"""Core: the records, contracts and events that every other layer speaks. Imports no
other layer but the errors.
"""

from __future__ import annotations
