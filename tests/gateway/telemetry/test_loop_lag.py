from __future__ import annotations

import pytest

from gateway.telemetry.loop_lag import TICK_S, LoopLag
from gateway.telemetry.metrics import LATE_SECONDS, Metrics
from tests.gateway.conftest import eventually, running
from tests.support.fakes import FakeReplica


@pytest.mark.parametrize(("later", "lag"), [(0.0, 0.0), (0.3, 0.3), (-0.01, 0.0)])
def test_what_is_late_is_counted(later: float, lag: float) -> None:
    late, now = Metrics().event_loop_lag_seconds, 100.0
    each = LoopLag(late, lambda: now)
    each.expect()
    now += TICK_S + later
    each.awake()
    *counts, total = late.values[()]
    assert (sum(counts), total) == (1, pytest.approx(lag))
    assert counts.index(1) == next(index for index, bound in enumerate(LATE_SECONDS) if lag <= bound)


async def test_a_gateway_measures_itself() -> None:
    async with FakeReplica() as one, running(one) as run:
        late = run.gateway.metrics.event_loop_lag_seconds
        await eventually(lambda: sum(late.values[()][:-1]) > 0)
