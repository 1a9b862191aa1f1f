"""Engine hosts: the processes in which real engines run, and the client that talks to them."""

from __future__ import annotations
