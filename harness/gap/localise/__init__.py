"""The module at which two forwards of the same tokens part by more than rounding."""

from __future__ import annotations
