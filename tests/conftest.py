from __future__ import annotations

from hypothesis import HealthCheck, settings

# On a shared machine how long a draw takes says nothing about the code: what is tested is what comes out.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
