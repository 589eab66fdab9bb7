"""What is held of an event that is not whole, against floods."""

from __future__ import annotations

import pytest

from gateway.admission.memory import Budget
from gateway.errors import GatewayError
from gateway.request.whole_events import UNCHARGED, WholeEvents


def test_an_endless_event_stays_within_the_budget_and_is_given_back() -> None:
    budget = Budget(1 << 20)
    lease = budget.lease("c")
    events = WholeEvents(lease)

    def flood(others: int = 0) -> None:
        for number in range(1, 1000):
            assert events.feed(b"x" * 10_000) == []
            events.charge()
            assert budget.held == max(0, number * 10_000 - UNCHARGED) + others

    with pytest.raises(GatewayError) as refused:
        flood()
    assert (refused.value.status, events.held, lease.held) == (413, 0, 0), "the client could not hold it alone"
    other = budget.lease("other")
    assert other.grow(500_000)
    with pytest.raises(GatewayError) as refused:
        flood(500_000)
    assert (refused.value.status, events.held, lease.held) == (503, 0, 0)


def test_a_whole_event_is_charged_no_more() -> None:
    budget = Budget(1 << 20)
    lease = budget.lease("c")
    events = WholeEvents(lease)
    events.feed(b"data: " + b"x" * 2 * UNCHARGED)
    events.charge()
    assert lease.held == UNCHARGED + len(b"data: ")
    assert len(events.feed(b"\n\ndata: half")) == 1
    events.charge()
    assert (lease.held, events.held) == (0, 10)
    assert events.finish() == [b"data: half\n\n"]
    assert (events.held, events.finish()) == (0, [])
