"""Sums of the last seconds are those of a list of everything."""

from hypothesis import given
from hypothesis import strategies as st

from replica.api.stats import Stats


@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from("ab"), st.integers(1, 9)), max_size=40), st.integers(1, 60))
def test_sums_are_those_of_all_that_was_added(events: list[tuple[float, str, int]], window: int) -> None:
    now, stats, all_events = 1000.0, Stats(1000.0), []
    for pause, name, amount in events:
        now += pause
        stats.add(name, amount, now)
        all_events.append((int(now), name, amount))
    for name in "ab":
        expected = sum(a for second, n, a in all_events if n == name and int(now) - window <= second < int(now))
        assert stats.total(name, window, now) == expected
        lived = min(window, int(now) - 1000)
        assert stats.rate(name, window, now) == (expected / lived if lived else 0.0)
    assert len(stats._slots) <= 61


def test_a_young_replica_reports_the_rates_of_its_life() -> None:
    stats = Stats(0.0)
    stats.add("decode_tokens", 100, 1.5)
    stats.phase("prefill", 0.5, 1.5)
    stats.phase("prefill", 0.3, 1.7)
    body = stats.body(4.0)
    assert body["per_second"]["decode_tokens"] == {"now": 25.0, "minute": 25.0}
    assert body["phases_last_minute"]["prefill"] == {"seconds": 0.8, "count": 2, "mean_ms": 400.0}
    assert body["phases_last_minute"]["send"] == {"seconds": 0, "count": 0, "mean_ms": 0.0}
    assert stats.body(70.0)["per_second"]["decode_tokens"] == {"now": 0.0, "minute": 0.0}
    assert repr(stats) == "<Stats 1 seconds, ['decode_tokens', 'prefill', 'prefill_count']>"
