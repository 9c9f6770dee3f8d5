"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No test's outcome may depend on how busy the machine is.
settings.register_profile(
    "flowtt", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("flowtt")
