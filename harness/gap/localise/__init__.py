"""Localisation: the module at which two forwards of the same tokens part."""

from __future__ import annotations
