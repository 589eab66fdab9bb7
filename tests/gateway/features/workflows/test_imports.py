"""Nothing of the runtime is imported before the first request for a workflow."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from gateway.app import compose
from gateway.features.table import new_metrics
from gateway.telemetry.log_output import LogOutput
from gateway.telemetry.request_log import RequestLog
from tests.support.configs import load
config = load(None, {"pools": [{"replicas": ["http://replica.memory:1"]}], "workflows": {"enabled": ENABLED}}, env={})
compose(config, RequestLog(LogOutput(lambda data: None), logging.INFO))
print(*sorted(name for name in sys.modules if name.startswith("gateway.features.workflows.")))
"""
DECLARED = {"declaration", "metrics", "section"}


@pytest.mark.parametrize(
    ("enabled", "expected"), [(True, DECLARED | {"feature", "quick_look", "recent_runs"}), (False, DECLARED)]
)
def test_a_gateway_starts_without_the_runtime(enabled: bool, expected: set[str]) -> None:
    program = PROGRAM.replace("ENABLED", str(enabled))
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert {name.removeprefix("gateway.features.workflows.") for name in printed.split()} == expected
