"""The limits of a serving process: its connections, by its file descriptors."""

from __future__ import annotations

import logging
import resource

import pytest

from gateway.cluster.process import connection_limit, warn_of_connections
from tests.support.configs import load


@pytest.mark.parametrize(
    ("connections", "files", "in_force", "level"),
    [
        (None, resource.RLIM_INFINITY, 10_000, None),
        (None, 20_512, 10_000, None),
        (None, 20_000, 9_744, logging.INFO),  # nobody has chosen 10,000
        (None, 1_024, 384, logging.WARNING),
        (9_000, 20_000, 9_000, None),
        (9_800, 20_000, 9_744, logging.WARNING),
    ],
)
def test_connections_are_limited_by_the_open_files(
    connections: int | None, files: int, in_force: int, level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {} if connections is None else {"limits": {"connections": connections}}
    config = load(None, {"pools": [{"replicas": ["http://127.0.0.1:9"]}], **limits}, env={})
    assert connection_limit(config, files) == in_force
    with caplog.at_level(logging.INFO, "warmroute.gateway"):
        warn_of_connections(config, files)
    lines = [(line.levelno, vars(line)["in_force"]) for line in caplog.records]
    assert lines == ([] if level is None else [(level, in_force)])
