"""Reference clients: correct resume clients, in process and over HTTP."""

from __future__ import annotations
