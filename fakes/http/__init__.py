"""HTTP faces of the fake engine: SGLang's and vLLM's servers, as far as reinforcement learning uses
them, on loopback.

The engine behind a face is the one of every other fake: coded values, the same traces, the same
faults.
"""

from __future__ import annotations
