"""The present price of a model's tokens: the price list, by model name, date, hour and length of the prompt.

    model ──► longest matching prefix ──► the price of that date ──► x factor of the hour ──► Rates, also for longer prompts

A result for a model is valid for a while (`Terms.begin` to `end`): until the list's next date, or for a model with peak hours
to the end of the minute. So a bill costs a lookup in a dict and two comparisons, which also notice a clock that jumps.

Pure: the time is an argument, Unix seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pygtrie

from gateway.accounting.money import DOLLAR, PER_MILLION
from gateway.config.kinds import MATCH_ALL, unix_time
from gateway.config.schema import DAYS, PeakConfig, PriceConfig, TierConfig

MAX_KNOWN: Final = 1024

_MINUTE: Final = 60.0
_DAY: Final = 1440  # minutes
_WEEK: Final = 7 * _DAY
_EPOCH: Final = 3 * _DAY  # 1970-01-01 was a Thursday


class Rates:
    """Picodollars for one token of each kind, and for one image."""

    __slots__ = ("cache_write", "cache_write_1h", "cached_input", "image", "input", "output")

    def __init__(self, input_: int, cached_input: int, cache_write: int, cache_write_1h: int, output: int, image: int) -> None:
        self.input = input_
        self.cached_input = cached_input
        self.cache_write = cache_write
        self.cache_write_1h = cache_write_1h
        self.output = output
        self.image = image

    def __repr__(self) -> str:
        return f"<Rates {self.input}, cached {self.cached_input}, output {self.output}>"


class Terms:
    """The rates of a model from `begin` to `end`. tiers: (prompt tokens, rates of longer prompts), the longest first."""

    __slots__ = ("begin", "end", "rates", "tiers")

    def __init__(self, begin: float, end: float, rates: Rates | None, tiers: tuple[tuple[int, Rates], ...] = ()) -> None:
        self.begin = begin
        self.end = end
        self.rates = rates
        self.tiers = tiers

    def of(self, prompt: int) -> Rates | None:
        """The rates for a prompt of this many tokens. None: there is no price."""
        for above, rates in self.tiers:
            if prompt > above:
                return rates
        return self.rates


class PriceBook:
    """The price list. prices: from the configuration, each model's in the order of their dates."""

    def __init__(self, prices: Mapping[str, Sequence[PriceConfig]]) -> None:
        self._trie: Any = pygtrie.CharTrie()
        for model, versions in prices.items():
            self._trie["" if model == MATCH_ALL else model] = tuple(map(_Version, versions))
        self._known: dict[str, Terms] = {}

    def at(self, model: str, now: float) -> Terms:
        """The terms of a model. O(1) mostly; O(length of the name) the first time, and after they end."""
        terms = self._known.get(model)
        if terms is not None and terms.begin <= now < terms.end:
            return terms
        match = self._trie.longest_prefix(model)
        terms = _terms(match.value, now) if match else Terms(-math.inf, math.inf, None)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()  # a prefix may match any number of names
        self._known[model] = terms
        return terms

    def __repr__(self) -> str:
        return f"<PriceBook of {len(self._trie)} models, {len(self._known)} names known>"


class _Version:
    """A model's prices from a date on. week: the number of the peak for each minute of the week, from Monday 00:00 UTC; 0: no
    peak.
    """

    __slots__ = ("price", "since", "week")

    def __init__(self, price: PriceConfig) -> None:
        self.price = price
        self.since = unix_time(price.since) if price.since else -math.inf
        self.week = _week(price.peak)

    def factor(self, minute: int) -> float:
        """The factor of all prices, in this minute since the epoch."""
        if not self.week:
            return 1.0
        peak = self.week[(minute + _EPOCH) % _WEEK]
        return self.price.peak[peak - 1].factor if peak else 1.0


def _week(peaks: Sequence[PeakConfig]) -> bytes:
    if not peaks:
        return b""
    week = bytearray(_WEEK)
    for number, peak in reversed(list(enumerate(peaks, 1))):  # if two overlap, the first one counts
        begin, end = map(_minute, peak.hours.split("-"))
        if end <= begin:
            end += _DAY
        for day in peak.days:
            for minute in range(begin, end):
                week[(DAYS.index(day) * _DAY + minute) % _WEEK] = number
    return bytes(week)


def _minute(time: str) -> int:
    hours, _, minutes = time.partition(":")
    return int(hours) * 60 + int(minutes)


def _terms(versions: Sequence[_Version], now: float) -> Terms:
    found: _Version | None = None
    end = math.inf
    for version in versions:
        if version.since > now:
            end = version.since
            break
        found = version
    if found is None:
        return Terms(-math.inf, end, None)
    begin, factor = found.since, 1.0
    if found.week:
        minute = math.floor(now / _MINUTE)
        factor = found.factor(minute)
        begin, end = max(begin, minute * _MINUTE), min(end, (minute + 1) * _MINUTE)
    price = found.price
    tiers = sorted(((tier.above, _tier_rates(price, tier, factor)) for tier in price.tiers), key=_above, reverse=True)
    written, hour = price.cache_write, price.cache_write_1h
    rates = _rates((price.input, price.cached_input, written, hour, price.output), price.image, factor)
    return Terms(begin, end, rates, tuple(tiers))


def _above(tier: tuple[int, Rates]) -> int:
    return tier[0]


def _tier_rates(price: PriceConfig, tier: TierConfig, factor: float) -> Rates:
    """The rates of a tier. Cache prices stay in proportion to the input price."""
    scale = tier.input / price.input if price.input else 1.0
    cache = [(each or 0.0) * scale for each in (price.cached_input, price.cache_write, price.cache_write_1h)]
    return _rates((tier.input, *cache, tier.output), price.image, factor)


def _rates(million: tuple[float | None, ...], image: float, factor: float) -> Rates:
    """Rates from configured prices. million: USD for a million tokens of each kind. image: USD."""
    a, b, c, d, e = (round((each or 0.0) * factor * PER_MILLION) for each in million)
    return Rates(a, b, c, d, e, round(image * factor * DOLLAR))
