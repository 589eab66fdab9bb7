"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A loaded machine is no reason to fail: what a test may take in all, pytest-timeout says.
settings.register_profile("warmroute", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("warmroute")
