"""Support: what the adapters of several stacks share."""

from __future__ import annotations
