"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

# A loaded machine is no reason to fail: what a test may take in all, pytest-timeout says.
settings.register_profile("warmroute", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For scripts/mutants.py: whether a test fails is all that counts there, not by which smallest example.
settings.register_profile(
    "mutants", parent=settings.get_profile("warmroute"), phases=[Phase.explicit, Phase.generate], database=None
)
settings.load_profile("warmroute")
