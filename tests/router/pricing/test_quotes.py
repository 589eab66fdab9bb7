"""`Quotes.cheapest` prices as few replicas as it can; here it must pick as if it had priced them all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import Outcome, Prompt, Replica, Router
from router.pricing import quotes as pricing
from router.pricing.quotes import Quotes
from router.types import Cost
from tests.support.compiled import uncompiled
from tests.support.machines import share_of
from tests.support.strategies import keys_of, prompt_of

RATES = [500.0, 8000.0, 8000.0, 50_000.0]
BLOCK = 200  # tokens: so that prefills take as long as queues, rents and returns matter


def prompt(text: bytes, session: int = 0) -> Prompt:
    return Prompt(keys_of(text), BLOCK * len(text) + 7, BLOCK, "", session_key=session)


letters = st.binary(min_size=1, max_size=7).map(lambda data: bytes(byte % 2 for byte in data))
texts = st.builds(prompt, letters, st.integers(0, 2))
names = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True).map(lambda some: [f"r{one}" for one in some])


@st.composite
def histories(draw: st.DrawFn) -> tuple[Router, float]:
    """A router that has seen a lot, with requests under way: unequal rates, full caches, rents."""
    router = Router(policy="cost", ttl_s=1e9, memory_bytes=1 << 24, chance=random.Random(draw(st.integers(0, 99))))
    fleet = [f"r{number}" for number in range(draw(st.integers(2, 6)))]
    for name in fleet:
        router.add(Replica(name, draw(st.none() | st.integers(1, 12))))
        router.ledger.open(name, 1, 1, 0.0).close(0.0)
        router.ledger.of(name).rate.value = draw(st.sampled_from(RATES))
    now = 0.0
    for _ in range(draw(st.integers(0, 25))):
        now += draw(st.sampled_from([0.0, 0.01, 1.0, 30.0]))
        only = draw(st.none() | st.sampled_from(fleet))
        booking = router.choose(draw(texts), [only] if only else fleet, now, silent=draw(st.booleans()))
        if draw(st.booleans()):
            booking.first_token(now)
        if draw(st.booleans()):
            booking.close(Outcome(ok=True), now + 0.01)
    for name in draw(st.lists(st.sampled_from(fleet), max_size=3)):
        router.came_up(name, now - draw(st.sampled_from([0.0, 5.0, 50.0])))
    for text in draw(st.lists(texts, max_size=3)):
        router.rents.pay(quotes_of(router, text, fleet, now).shared_prefix, draw(st.sampled_from([0.01, 0.2, 5.0])))
    return router, now


def quotes_of(router: Router, asked: Prompt, replicas: Collection[str], now: float, kind: type[Quotes] = Quotes) -> Quotes:
    quotes = kind(router.trie, router.ledger, asked, router.units_per_token(asked.scale), replicas, now)
    quotes.discount(router.rents)
    if session := router.sessions.find(asked.session_key):
        share = router.sessions.share(session, asked.origin)
        quotes.expect(router.sessions, session, share, -1.0, router.units_per_token(asked.scale))
    return quotes


@settings(max_examples=share_of(400))
@given(histories(), texts, names, st.floats(0, 100))
def test_the_cheapest_is_the_cheapest_of_all(
    history: tuple[Router, float], asked: Prompt, some: list[str], later: float
) -> None:
    """Also of fleets with strangers in them, and of fleets without the holders."""
    router, now = history
    quotes = quotes_of(router, asked, some, now + later)
    best, idle = quotes.cheapest(random.Random(1))
    costs = {name: quotes.candidate(name).cost.total_s for name in some}
    assert best == quotes.candidate(best.replica)
    assert costs[best.replica] == pytest.approx(min(costs.values()), rel=1e-9, abs=1e-12)
    lacking = [name for name in some if quotes.matched.get(name, 0) < quotes.longest]
    assert idle is any(not router.ledger.of(name).waiting for name in lacking)


def router_with(count: int) -> tuple[Router, list[str]]:
    router, fleet = Router(policy="cost", ttl_s=1e9, memory_bytes=1 << 24, chance=random.Random(1)), []
    for number in range(count):
        fleet.append(f"r{number}")
        router.add(Replica(fleet[-1]))
    return router, fleet


def picks(quotes: Quotes, rounds: int) -> Counter[str]:
    chance = random.Random(7)
    return Counter(quotes.cheapest(chance)[0].replica for _ in range(rounds))


@pytest.mark.parametrize("holders", [[], ["r1", "r3", "r4"], ["r0", "r4"]])
def test_ties_are_fair_wherever_in_the_list_they_stand(holders: list[str]) -> None:
    router, fleet = router_with(5)
    for name in holders:
        router.trie.insert(name, prompt(b"abc").keys, 0.0)
    taken = picks(quotes_of(router, prompt(b"abcd"), fleet, 0.0), 2000)
    equal = holders or fleet
    assert set(taken) == set(equal)
    assert all(taken[name] == pytest.approx(2000 / len(equal), rel=0.15) for name in equal)


def test_a_tie_with_the_holder_is_fair_too() -> None:
    """All of the prompt is held, or paid for by rent: nothing costs anything anywhere."""
    router, fleet = router_with(4)
    asked = prompt_of(bytes(100))
    router.trie.insert("r2", asked.keys, 0.0)
    quotes = quotes_of(router, asked, fleet, 0.0)
    router.rents.pay(quotes.shared_prefix, 1e6)
    taken = picks(quotes_of(router, asked, fleet, 0.0), 2000)
    assert all(taken[name] == pytest.approx(500, rel=0.15) for name in fleet)


COUNTABLE: Any = Quotes if pricing.__file__.endswith(".py") else object


class Counted(COUNTABLE):  # type: ignore[misc]
    """priced: how many prices it had to compute."""

    __slots__ = ("priced",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.priced = 0

    def price(self, *arguments: Any) -> Cost:
        self.priced += 1
        return super().price(*arguments)


@uncompiled
@pytest.mark.parametrize(("asked", "prices"), [(b"abcdef", 1), (b"xyz", 64)])
def test_a_replica_that_cannot_win_is_not_priced(asked: bytes, prices: int) -> None:
    """Of 64 idle replicas one holds most of the prompt; of a prompt that nobody holds, all might be the cheapest."""
    router, fleet = router_with(64)
    router.trie.insert("r40", prompt(b"abcde").keys, 0.0)
    quotes = quotes_of(router, prompt(asked), fleet, 0.0, Counted)
    quotes.cheapest(random.Random(1))
    assert isinstance(quotes, Counted)
    assert quotes.priced == prices


@uncompiled
def test_a_replica_with_a_long_queue_is_not_priced() -> None:
    """Behind the prompt whose turn it is waits another of half our length: that alone is more than an idle replica takes."""
    router, fleet = router_with(8)
    asked = prompt(b"abcdefgh")
    for name in fleet[1:]:
        router.ledger.open(name, asked.units, asked.units, 0.0)
        router.ledger.open(name, asked.units // 2, asked.units // 2, 0.0)
    quotes = quotes_of(router, asked, fleet, 0.0, Counted)
    assert quotes.cheapest(random.Random(1))[0].replica == fleet[0]
    assert isinstance(quotes, Counted)
    assert quotes.priced == 1


def test_a_faster_replica_is_not_overlooked_for_what_it_lacks() -> None:
    router, fleet = router_with(2)
    for name, rate in zip(fleet, (1000.0, 9000.0), strict=True):
        router.ledger.open(name, 1, 1, 0.0).close(0.0)
        router.ledger.of(name).rate.value = rate
    router.trie.insert("r0", prompt(b"a").keys, 0.0)
    best, idle = quotes_of(router, prompt(b"abcd"), fleet, 1e6).cheapest(random.Random(1))
    assert (best.replica, idle) == ("r1", True)


def test_a_replica_that_answers_plainly_is_idle_once_its_prefill_must_be_over() -> None:
    """Nothing reports it: its silent requests have to be settled first, or a look at its queue misleads."""
    router, fleet = router_with(3)
    router.trie.insert("r1", prompt(b"abcdef").keys, 0.0)
    for name in fleet:
        router.choose(prompt(name.encode()), [name], 0.0, silent=True)
    quotes = quotes_of(router, prompt(b"abcdefg"), fleet, 100.0)
    assert quotes.cheapest(random.Random(1))[1] is True


def test_only_the_learned_share_of_the_answered_is_expected_back() -> None:
    router, fleet = router_with(1)
    router.ledger.open("r0", 1, 1, 0.0).close(0.0)
    others_s = []
    for _ in range(2):
        others_s.append(quotes_of(router, prompt(b"abcd"), fleet, 0.0).candidate("r0").cost.others_s)
        for _ in range(30):
            router.ledger.of("r0").rate.pool.conversation.sent(begins=True)
    assert others_s[1] == pytest.approx(others_s[0] / 4)
    assert others_s[0] > 0


def test_a_rent_is_no_discount_where_nobody_holds_anything() -> None:
    router, fleet = router_with(2)
    router.rents.pay(b"", 100.0)
    quotes = quotes_of(router, prompt(b"abcd"), fleet, 0.0)
    assert quotes.shared_prefix == b""
    assert all(quotes.candidate(name).cost.rent_s == 0.0 for name in fleet)


def test_the_rent_of_a_prefix_is_taken_off_where_it_is_missing_alone() -> None:
    router, fleet = router_with(3)
    router.trie.insert("r1", prompt(b"abc").keys, 0.0)
    quotes = quotes_of(router, prompt(b"abcd"), fleet, 0.0)
    assert quotes.shared_prefix == keys_of(b"abc")[-8:], "named by its last block"
    router.rents.pay(quotes.shared_prefix, 0.02)
    rents = [quotes_of(router, prompt(b"abcd"), fleet, 0.0).candidate(name).cost.rent_s for name in fleet]
    assert rents == [-0.02, 0.0, -0.02]


def test_blocks_are_rounded_to_tokens_and_are_never_more_than_the_prompt() -> None:
    router, fleet = router_with(1)
    quotes = Quotes(router.trie, router.ledger, prompt(b"abc"), 3.0, fleet, 0.0)
    assert quotes.total == 202
    assert [quotes.tokens(blocks) for blocks in (0, 1, 2, 3, 9)] == [0, 67, 133, 200, 202]
