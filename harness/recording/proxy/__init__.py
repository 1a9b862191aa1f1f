"""A reverse proxy before an engine's HTTP server that records what passes."""

from __future__ import annotations

from rollproof.core.extras import require_extra

require_extra("serve", "Recording proxies")
