"""Pods that come, go and flap under load: see tests/support/flapping/scenario.py. Longer: WARMROUTE_FLAP_MINUTES=10, in
another order: WARMROUTE_FLAP_SEED.

The same against a real API server: tests/deploy/test_cluster.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flapping.api_servers import fake_api_server
from tests.support.flapping.name_servers import REFRESH_S, TTL_S, dns_of_pods
from tests.support.flapping.run import Clock, chance, follow, minutes
from tests.support.flapping.scenario import LASTING, QUICK

MINUTES = minutes(0.05)
PACE = QUICK if MINUTES < 1 else LASTING


@pytest.mark.timeout(MINUTES * 180 + 300)
async def test_a_gateway_follows_pods_by_an_api_server_that_fails_now_and_then() -> None:
    random = chance(1)
    async with fake_api_server(random) as server:
        await follow(server, random, PACE, MINUTES * 60, Clock(), late_s=1.0)


@pytest.mark.tools
@pytest.mark.timeout(MINUTES * 180 + 300)
async def test_a_gateway_follows_pods_by_a_name_server_that_fails_now_and_then(tmp_path: Path) -> None:
    """A pod that is to go is in the resolver's cache for a while, and the gateway asks every few seconds."""
    random, clock = chance(2), Clock()
    async with dns_of_pods(tmp_path, clock, random) as names:
        await follow(names, random, PACE, MINUTES * 60, clock, late_s=REFRESH_S + TTL_S + 1.0)
