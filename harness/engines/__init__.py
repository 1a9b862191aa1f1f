"""Real engines: adapters that let a rollout engine be driven call by call, and the conformance run
on them.
"""

from __future__ import annotations
