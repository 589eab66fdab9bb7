from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounting.prices import MAX_KNOWN, PriceBook
from gateway.config.kinds import unix_time
from gateway.config.schema import DAYS, PeakConfig, PriceConfig, TierConfig


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def price(**fields: Any) -> PriceConfig:
    return PriceConfig(**{"input": 2.0, "output": 10.0, **fields})


def rate(book: PriceBook, now: float = 0.0, prompt: int = 10, kind: str = "input", model: str = "m") -> float | None:
    """USD for a million tokens."""
    rates = book.at(model, now).of(prompt)
    found: int | None = rates and getattr(rates, kind)
    return None if found is None else found / 1e6


NIGHT = PeakConfig(hours="01:00-04:00", days=DAYS[:5], factor=2)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("2026-09-30T23:59:59.999", None),
        ("2026-10-01T00:00:00", 2.0),
        ("2026-10-06T23:59:59.999", 2.0),
        ("2026-10-07T00:00:00", 4.0),
        ("2026-10-08T15:59:59.999", 4.0),
        ("2026-10-08T16:00:00", 1.0),
        ("2030-01-01T00:00:00", 1.0),
    ],
)
def test_prices_change_on_their_dates(now: str, expected: float | None) -> None:
    versions = [price(since="2026-10-01"), price(since="2026-10-07", input=4.0)]
    book = PriceBook({"m": [*versions, price(since="2026-10-08T18:00:00+02:00", input=1.0)]})
    assert rate(book, at(now)) == expected


def test_a_clock_that_jumps_finds_the_prices_of_its_time() -> None:
    book = PriceBook({"m": [price(), price(since="2026-10-07", input=4.0)], "p": [price(peak=(NIGHT,))]})
    early, late = at("2026-10-06"), at("2026-10-08")
    assert [rate(book, now) for now in (early, late, early, 0.0, late, -1e9)] == [2, 4, 2, 2, 4, 2]
    peak = at("2026-11-25T02:00")
    assert [rate(book, now, model="p") for now in (peak, peak - 7200, peak, peak + 7200)] == [4, 2, 4, 2]


@pytest.mark.parametrize(
    ("now", "factor"),
    [
        ("2026-11-25T00:59:59", 1),  # a Wednesday
        ("2026-11-25T01:00:00", 2),
        ("2026-11-25T03:59:59.9", 2),
        ("2026-11-25T04:00:00", 1),
        ("2026-11-28T02:00:00", 1),  # a Saturday
        ("2026-11-30T02:00:00", 2),  # a Monday
    ],
)
def test_peak_hours(now: str, factor: float) -> None:
    tier = TierConfig(above=100, input=4.0, output=15.0)
    book = PriceBook({"m": [price(peak=(NIGHT,), tiers=(tier,), image=0.0025)]})
    assert rate(book, at(now)) == 2 * factor
    assert rate(book, at(now), kind="output") == 10 * factor
    assert rate(book, at(now), kind="cached_input") == pytest.approx(0.2 * factor)
    assert rate(book, at(now), prompt=101) == 4 * factor
    for prompt in (100, 101):
        rates = book.at("m", at(now)).of(prompt)
        assert rates is not None
        assert rates.image == 2_500_000_000 * factor, "a price as all others"


def test_hours_that_pass_midnight_are_those_of_the_day_on_which_they_begin() -> None:
    book = PriceBook({"m": [price(peak=(PeakConfig(hours="22:00-06:00", days=("sun",), factor=3),))]})
    times = ("2026-11-29T21:59", "2026-11-29T22:00", "2026-11-30T05:59", "2026-11-30T06:00", "2026-11-29T05:00")
    assert [rate(book, at(time)) for time in times] == [2, 6, 6, 2, 2]
    whole = PriceBook({"m": [price(peak=(PeakConfig(hours="00:00-24:00", days=("mon",), factor=3),))]})
    assert [rate(whole, at(time)) for time in ("2026-11-30T00:00", "2026-11-30T23:59", "2026-12-01T00:00")] == [6, 6, 2]


@given(
    st.lists(
        st.builds(
            PeakConfig,
            hours=st.tuples(st.integers(0, 23), st.integers(0, 59), st.integers(0, 23), st.integers(0, 59))
            .filter(lambda times: times[:2] != times[2:])
            .map(lambda times: "{:02d}:{:02d}-{:02d}:{:02d}".format(*times)),
            days=st.lists(st.sampled_from(DAYS), min_size=1, unique=True).map(tuple),
            factor=st.integers(2, 50),
        ),
        max_size=4,
    ),
    st.lists(st.integers(0, 4 * 10**9), min_size=1, max_size=20),
)
def test_peaks_are_those_of_a_calendar(peaks: list[PeakConfig], times: list[int]) -> None:
    """Any order of times, as of a clock that jumps. The oracle knows days and times of day, no minutes of a week."""

    def factor(now: datetime) -> float:
        for peak in peaks:
            begin, end = peak.hours.split("-")
            for day in (now, now - timedelta(days=1)):
                start = day.replace(hour=int(begin[:2]), minute=int(begin[3:]), second=0)
                stop = day.replace(hour=int(end[:2]), minute=int(end[3:]), second=0)
                stop += timedelta(days=stop <= start)
                if DAYS[start.weekday()] in peak.days and start <= now < stop:
                    return peak.factor
        return 1

    book = PriceBook({"m": [price(peak=tuple(peaks))]})
    for now in times:
        assert rate(book, float(now)) == 2 * factor(datetime.fromtimestamp(now, UTC)), now


def test_long_prompts_have_the_price_of_their_tier() -> None:
    tiers = (
        TierConfig(above=200_000, input=8.0, output=30.0),
        TierConfig(above=1000, input=4.0, output=15.0),
    )
    book = PriceBook({"m": [price(cached_input=0.5, cache_write=3.0, tiers=tiers)]})
    assert [rate(book, prompt=prompt) for prompt in (1000, 1001, 200_000, 200_001)] == [2, 4, 4, 8]
    assert [rate(book, prompt=prompt, kind="output") for prompt in (1000, 1001, 200_001)] == [10, 15, 30]
    cached = [rate(book, prompt=prompt, kind="cached_input") for prompt in (1000, 1001, 200_001)]
    assert cached == [0.5, 1, 2], "in proportion to input"
    assert [rate(book, prompt=prompt, kind="cache_write_1h") for prompt in (1000, 200_001)] == [3, 12]
    free = PriceBook({"m": [price(input=0.0, cached_input=1.0, tiers=tiers[:1])]})
    assert rate(free, prompt=200_001, kind="cached_input") == 1, "no proportion to nothing"


def test_names_are_remembered_up_to_a_bound() -> None:
    book = PriceBook({"m": [price()], "*": [price(input=1.0)]})
    for number in range(3 * MAX_KNOWN):
        assert rate(book, model=f"m-{number}") == 2
        assert rate(book, model=f"x-{number}") == 1
    assert repr(book) == f"<PriceBook of 2 models, {MAX_KNOWN} names known>"


@pytest.mark.parametrize(
    "text", ["0001-01-01", "9999-12-31T23:59:59.999999", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59-23:59"]
)
def test_any_date_is_a_time(text: str) -> None:
    assert isinstance(unix_time(text), float)
