"""What is held of events, against floods."""

from __future__ import annotations

import asyncio

from gateway.admission.memory import Budget
from gateway.features.runs.event_log import HELD_S, Logs


def test_a_flood_stays_within_all_bounds() -> None:
    budget, logs = Budget(1 << 20), Logs(max_log=1000, max_logs=2500, max_ended=3)
    made = [logs.open(("o", str(number)), budget.lease("c")) for number in range(5)]
    for number in range(2000):
        logs.add(made[number % 5], b"e" * (number % 50 + 1))
        logs.check()
        assert logs.size <= 2500
        assert all(log.size <= 1000 for log in made)
    for number in range(5):
        logs.end(("o", str(number)), float(number))
        logs.check()
    assert len(logs) == 3
    logs.expire(HELD_S + 3)
    assert logs.keys() == [("o", "4")]
    logs.expire(HELD_S + 4)
    logs.check()
    assert (len(logs), logs.size, budget.held) == (0, 0, 0)


def test_without_memory_the_oldest_events_go() -> None:
    budget, logs = Budget(1000), Logs()
    log = logs.open(("o", "1"), budget.lease("c"))
    for number in range(50):
        logs.add(log, b"%0100d" % number)
        logs.check()
        assert budget.held <= 1000
    assert log.next == 50
    assert log.since(0) is None
    found = log.since(48)
    assert found
    assert found == (b"%0100d" % 49, 49)
    logs.add(log, b"x" * 2000)
    assert (log.next, log.since(49), log.size) == (51, None, 0)


def test_events_that_the_only_reader_has_are_dropped() -> None:
    budget, logs = Budget(1000), Logs()
    log = logs.open(("o", "1"), budget.lease("c"))
    for number in range(9):
        logs.add(log, b"%0100d" % number)
    logs.sent(log, 5)
    logs.check()
    assert (log.first, log.size, logs.size, budget.held) == (6, 300, 300, 300)
    logs.sent(log, 20)
    assert (log.first, log.size, budget.held) == (9, 0, 0)
    assert log.since(8) == (b"", 8)


async def test_followers_that_left_are_forgotten() -> None:
    logs = Logs()
    log = logs.open(("o", "1"), Budget(1000).lease("c"))
    following = [asyncio.create_task(log.changed()) for _ in range(100)]
    await asyncio.sleep(0)
    assert log.followers == 100
    for task in following[:99]:
        task.cancel()
    await asyncio.gather(*following[:99], return_exceptions=True)
    assert log.followers == 1
    logs.add(log, b"e")
    await following[99]
    assert log.followers == 0
