"""Settings for all tests: signals, hypothesis profiles, chosen by HYPOTHESIS_PROFILE (CONTRIBUTING.md lists them)."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, Phase, settings

pytest.register_assert_rewrite("tests.chaos.stage")
# A shell without job control starts what is in the background with SIGINT ignored, and so would be what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine is no reason to fail: pytest-timeout limits a test's time.
settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow])
_CI = settings.get_profile("ci")
# Ten times the examples of every property test that does not choose a number, and state machines at full depth.
settings.register_profile("nightly", parent=_CI, max_examples=1000)
# State machines take a few steps only: enough to find a value of a type that compiled code refuses.
settings.register_profile("compiled", parent=_CI)
# For `make mutants`: only whether a test fails counts there, not the smallest failing example.
settings.register_profile("mutants", parent=_CI, phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
