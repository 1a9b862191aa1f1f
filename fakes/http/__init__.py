"""Fake SGLang and vLLM servers on 127.0.0.1, as far as reinforcement learning uses them.

The engine of a server is the fake engine of every other simulation: coded values, the same traces,
the same faults.
"""

from __future__ import annotations

from rollproof.core.extras import require_extra

require_extra("serve", "The fake HTTP servers")
