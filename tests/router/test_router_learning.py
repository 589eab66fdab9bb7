"""What the router makes of what it sees: restarts, the size of a cache, hot prefixes, who comes back when, unequal replicas."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from typing import Any

import pytest

from router import Booking, Outcome, Prompt, Replica, Router, text_keys
from router.index.paid import MAX_HOLDERS, MEMORY_SHARE, PaidPrefixes
from router.learning.conversations import PRIOR
from router.learning.foreign import BUSY_S
from router.pricing.cost import FREE_SHARE
from router.simulation.fleet import Cache, FleetSpec, RouterPlacement, ServedRequest, Simulation
from router.simulation.generators import NoReuse
from router.simulation.policies import SIMULATED
from router.simulation.workloads import SimulatedRequest
from router.types import TOKEN_WEIGHT
from tests.support.strategies import prompt_of

OK = Outcome(ok=True)
R1, BOTH = ["r1"], ["r1", "r2"]


def router_with(*names: str, capacity: int | None = None, **options: Any) -> Router:
    router = Router(**{"policy": "cost", "ttl_s": 1e6, "memory_bytes": 1 << 26, "chance": random.Random(3), **options})
    for name in names:
        router.add(Replica(name, capacity))
    return router


def served(router: Router, prompt: Prompt, now: float, cached: int | None = None, name: str = "r1") -> Booking:
    """One request on a replica, answered at once."""
    booking = router.choose(prompt, [name], now)
    booking.close(Outcome(True, prompt.units, cached), now)
    return booking


def numbered(number: int, blocks: int = 10) -> Prompt:
    """Prompts that differ from their first block."""
    return Prompt(text_keys(bytes(blocks), 1, seed=number), blocks, 1, "")


# -- hot prefixes


def wait_for_hot_head(router: Router, turn: int, others: int = 0) -> Booking:
    """Another question about the same 4000 tokens, while the holder r1 has 3000 tokens before it, and r2 `others`."""
    queue = [router.choose(prompt_of(b"q" + bytes([turn]) * 2999), R1, float(turn))]
    if others:
        queue.append(router.choose(prompt_of(b"o" + bytes([turn]) * (others - 1)), ["r2"], float(turn)))
    booking = router.choose(prompt_of(b"h" * 4000 + bytes([turn]) * 10), BOTH, float(turn))
    for one in (*queue, booking):
        one.close(Outcome(ok=one is booking), turn + 0.5)  # the queue leaves no trace
    return booking


def test_a_hot_prefix_is_copied_once_its_rent_is_paid() -> None:
    """A copy costs a second, for 4000 tokens twice (to compute them, and to hold them twice); each wait costs 3/8 of one."""
    router = router_with("r1", "r2")
    served(router, prompt_of(b"h" * 4000), 0.0)
    story = [wait_for_hot_head(router, turn) for turn in range(1, 4)]
    assert [booking.decision.reason for booking in story] == ["warm", "warm", "spill"]
    assert [booking.chosen.cost.rent_s for booking in story] == pytest.approx([0.0, 0.0, -0.75])
    assert len(router.rents) == 0, "the copy is bought"
    assert router.trie.match(story[0].prompt.keys, 3.0)["r2"] == 4000
    assert wait_for_hot_head(router, 4).decision.reason == "warm", "there are two now"


def sibling(router: Router, name: bytes, now: float) -> Booking:
    """A request with the common head of 4000 tokens, and a tail of 10."""
    return router.choose(prompt_of(b"h" * 4000 + name * 10), BOTH, now)


def test_siblings_that_begin_at_once_with_a_cold_prefix_stay_together() -> None:
    """They wait for the first computation of their prefix, and a copy would take as long."""
    router = router_with("r1", "r2")
    assert len({sibling(router, bytes([number]), 0.0).chosen.replica for number in range(10)}) == 1
    ((prefix, paid_s),) = router.rents.entries()
    assert prefix == prompt_of(b"h" * 4000).keys[-8:]
    assert paid_s == pytest.approx(sum(range(10)) * 10 / 8000)


@pytest.mark.parametrize(("elapsed_s", "rent_s"), [(0.0, 3010 / 8000), (0.25, 1010 / 8000), (0.5, 10 / 8000)])
def test_the_computation_of_the_prefix_itself_is_no_rent(elapsed_s: float, rent_s: float) -> None:
    """A second sibling pays for the rest of its queue: another prompt, less its progress, and the tail of the first sibling."""
    router = router_with("r1", "r2")
    router.choose(prompt_of(b"q" * 3000), R1, 0.0)
    router.choose(prompt_of(b"h" * 4000 + b"a" * 10), R1, 0.0)
    assert sibling(router, b"b", elapsed_s).chosen.replica == "r1"
    assert [seconds for _, seconds in router.rents.entries()] == [pytest.approx(rent_s)]


def test_no_rent_is_paid_while_nobody_idle_lacks_the_prefix() -> None:
    router = router_with("r1", "r2")
    served(router, prompt_of(b"h" * 4000), 0.0)
    assert {wait_for_hot_head(router, turn, others=100).decision.reason for turn in range(1, 20)} == {"warm"}
    assert len(router.rents) == 0


def test_a_single_conversation_is_never_copied() -> None:
    """It waits at every turn for others, but each turn ends another prefix."""
    router = router_with("r1", "r2")
    for turn in range(1, 60):
        queue = router.choose(prompt_of(b"q" + bytes([turn]) * 2999), R1, float(turn))
        booking = router.choose(prompt_of(b"h" * (4000 + 50 * turn)), R1 if turn == 1 else BOTH, float(turn))
        assert booking.chosen.replica == "r1"
        booking.close(OK, turn + 0.5)
        queue.close(Outcome(ok=False), turn + 0.5)
    assert len(router.rents) > 50


def test_only_the_cost_policy_pays_rent() -> None:
    router = router_with("r1", "r2", policy="longest_prefix", policies=SIMULATED)
    served(router, prompt_of(b"h" * 4000), 0.0)
    for turn in range(1, 10):
        assert wait_for_hot_head(router, turn).chosen.replica == "r1"
    assert len(router.rents) == 0


# -- restarts


def test_a_restart_shows_in_three_warm_prefixes_that_are_gone_and_purges_once() -> None:
    router = router_with("r1", capacity=1000)
    for number in range(8):
        served(router, numbered(number), 0.0)
    served(router, numbered(7), 1.0, cached=10)
    under_way = [router.choose(numbered(number), R1, 10.0) for number in range(6)]
    assert [booking.close(Outcome(True, 10, 0), 11.0) for booking in under_way] == [False, False, True, False, False, False]
    assert router.trie.evicted["purge"] > 0
    assert router.trie.match(numbered(7).keys, 11.0) == {}, "nothing is left of what it held before"
    for number in (3, 4, 5):
        assert router.trie.match(numbered(number).keys, 11.0) == {"r1": 10}, "what it has just computed it holds"
    served(router, numbered(5), 11.5, cached=10)
    again = [router.choose(numbered(number), R1, 12.0) for number in (3, 4, 5)]
    assert [booking.close(Outcome(True, 10, 0), 13.0) for booking in again] == [False, False, True], "and again"


def test_an_engine_that_always_reports_zero_has_not_restarted() -> None:
    router = router_with("r1", capacity=1000)
    for turn in range(50):
        assert not router.choose(numbered(turn % 5), R1, float(turn)).close(Outcome(True, 10, 0), float(turn))
    assert router.trie.evicted["purge"] == 0


def test_a_client_among_others_makes_no_restart_alone() -> None:
    router = router_with("r1", capacity=1000)
    for number in range(10):
        served(router, of_client(numbered(number), number % 2), 0.0)
    served(router, of_client(numbered(9), 1), 1.0, cached=10)
    for number in range(6):
        assert not router.choose(of_client(numbered(number), 2), R1, 10.0).close(Outcome(True, 10, 0), 11.0)
    assert router.trie.match(numbered(8).keys, 11.0) == {"r1": 10}
    assert router.choose(of_client(numbered(7), 1), R1, 12.0).close(Outcome(True, 10, 0), 13.0), "another has seen it too"
    assert router.trie.match(numbered(8).keys, 13.0) == {}


def test_a_client_that_has_a_replica_to_itself_makes_a_restart_alone() -> None:
    router = router_with("r1", capacity=1000, ttl_s=100.0)
    served(router, of_client(numbered(20), 1), 0.0)
    for number in range(5):
        served(router, of_client(numbered(number), 2), 90.0)
    served(router, of_client(numbered(4), 2), 91.0, cached=10)
    lost = [router.choose(of_client(numbered(number), 2), R1, 95.0 + 50 * number) for number in range(4)]
    assert [booking.close(Outcome(True, 10, 0), 95.1 + 50 * turn) for turn, booking in enumerate(lost)][:2] == [False, False]


def of_client(prompt: Prompt, client: int) -> Prompt:
    return Prompt(prompt.keys, prompt.units, prompt.block_units, prompt.scale, client=client)


def test_a_hit_among_the_misses_is_no_restart() -> None:
    router = router_with("r1", capacity=1000)
    for number in range(9):
        served(router, numbered(number), 0.0)
    for number, cached in enumerate((0, 0, 10, 0, 0, 3, 0, 0)):
        assert not router.choose(numbered(number), R1, 10.0 + number).close(Outcome(True, 10, cached), 10.0 + number)
    assert router.trie.evicted["purge"] == 0


@pytest.mark.parametrize("outcome", [Outcome(True, 10), Outcome(False, 10, 0), Outcome(True, 10, -1), Outcome(True, 10, 11)])
def test_what_is_no_count_is_no_miss(outcome: Outcome) -> None:
    router = router_with("r1")
    for number in range(9):
        served(router, numbered(number), 0.0)
        served(router, numbered(number), 0.0, cached=10)
    for number in range(9):
        assert not router.choose(numbered(number), R1, 1.0).close(outcome, 2.0)
    assert router.trie.held_by("r1") == 90


def test_a_match_of_one_block_is_neither_hit_nor_miss() -> None:
    """Tokens are an estimate: it may well be less than a block of the engine's."""
    router = router_with("r1", capacity=1000)
    for number in range(3):
        served(router, numbered(number), 0.0)
    served(router, numbered(3, 1), 0.0)
    served(router, numbered(2), 1.0, cached=10)
    story = [(numbered(0), 10), (numbered(1), 10), (numbered(3, 1), 1), (numbered(2), 10)]
    asked = [(router.choose(prompt, R1, 2.0), tokens) for prompt, tokens in story]
    assert [booking.close(Outcome(True, tokens, 0), 3.0) for booking, tokens in asked] == [False, False, False, True]


def test_a_cold_prompt_that_was_not_cached_is_no_miss() -> None:
    router = router_with("r1")
    served(router, numbered(20), 0.0)
    served(router, numbered(20), 0.0, cached=10)
    for number in range(20):
        assert not router.choose(numbered(number), R1, float(number)).close(Outcome(True, 10, 0), float(number))
    assert router.trie.evicted["purge"] == 0


# -- how large a cache is


def of_an_engine(router: Router, engine: Cache, prompts: int, rounds: int, start: float) -> None:
    """Prompts of 50 tokens, some asked for often and some seldom, on a replica with an exact LRU cache."""
    chance = random.Random(5)
    for turn in range(rounds):
        now = start + turn
        prompt = numbered(int(prompts * chance.random() ** 2), 50)
        booking = router.choose(prompt, R1, now)
        booking.close(Outcome(True, 50, engine.take(SimulatedRequest(prompt, 0, ""), now)), now + 0.5)


def test_a_replica_of_unknown_size_shows_how_much_it_holds_and_later_that_it_holds_more() -> None:
    router, engine = router_with("r1", ttl_s=300.0), Cache(1000)
    of_an_engine(router, engine, prompts=15, rounds=200, start=0.0)
    assert router.learned_capacity("r1") is None, "everything fits"
    of_an_engine(router, engine, prompts=60, rounds=2000, start=1000.0)
    small = router.learned_capacity("r1")
    assert small == pytest.approx(1000, rel=0.25)
    assert router.trie.held_by("r1") <= small
    engine.capacity_tokens = 2000
    of_an_engine(router, engine, prompts=60, rounds=3000, start=10_000.0)
    assert router.learned_capacity("r1") == pytest.approx(2000, rel=0.35)
    router.check()


def test_an_engine_that_reports_its_capacity_is_believed() -> None:
    router, engine = router_with("r1", capacity=3000), Cache(1000)
    of_an_engine(router, engine, prompts=60, rounds=1000, start=0.0)
    assert router.learned_capacity("r1") is None
    assert router.trie.held_by("r1") > 1500


def test_a_prefix_that_was_lost_while_as_old_ones_survive_teaches_no_capacity() -> None:
    router = router_with("r1")
    for number in range(10):
        served(router, numbered(number), float(number))
    served(router, numbered(4), 100.0, cached=10)  # there, though 50 blocks are younger
    served(router, numbered(6), 101.0, cached=0)  # gone, and no more than 40 are
    assert router.learned_capacity("r1") is None
    served(router, numbered(1), 102.0, cached=0)
    assert router.learned_capacity("r1") == 80, "all that was used since, but not the prompt itself"
    assert router.trie.held_by("r1") <= 80


def with_a_learned_capacity() -> Router:
    """Prompt 0 is lost after 20 blocks of others, while 1 is there all the time."""
    router = router_with("r1")
    for now, number, cached in ((0, 1, None), (1, 1, 10), (1, 0, 0), (2, 2, 0), (2, 1, 10), (3, 0, 0), (4, 1, 10)):
        served(router, numbered(number), float(now), cached)
    assert router.learned_capacity("r1") == 20
    return router


def test_a_capacity_learned_is_forgotten_with_the_replica() -> None:
    router = with_a_learned_capacity()
    router.add(Replica("r1"))
    assert router.learned_capacity("r1") == 20, "no new size is given"
    router.remove("r1")
    assert router.learned_capacity("r1") is None


def test_a_capacity_that_is_reported_later_replaces_the_learned_one() -> None:
    router = with_a_learned_capacity()
    router.add(Replica("r1", 40))
    assert router.learned_capacity("r1") is None
    for number in range(20):
        served(router, numbered(number), 50.0)
    assert router.trie.held_by("r1") == 40


def test_a_capacity_that_was_learned_is_kept_to_and_grows_only_where_it_was_the_limit() -> None:
    router = with_a_learned_capacity()
    for number in range(5):
        served(router, numbered(number), 50.0)
        assert router.trie.held_by("r1") == 20
    router.restarted("r1")
    served(router, numbered(0), 51.0, cached=10)
    assert router.learned_capacity("r1") == 20, "of an empty cache we believe less than anybody holds"
    served(router, numbered(1), 52.0, cached=10)
    assert router.learned_capacity("r1") == 23, "but now it was full"


def test_a_restart_of_a_replica_of_unknown_size_teaches_no_capacity_below_what_it_has_held() -> None:
    router = router_with("r1")
    for number in range(20):
        served(router, numbered(number), float(number))
    served(router, numbered(3), 20.0, cached=10)  # with 160 younger blocks
    under_way = [router.choose(numbered(number), R1, 30.0) for number in (10, 12, 14, 16, 18)]
    assert [booking.close(Outcome(True, 10, 0), 31.0) for booking in under_way] == [False, False, True, False, False]
    assert router.learned_capacity("r1") is None


# -- what must be forgotten


def test_a_cold_prompt_goes_where_the_coldest_blocks_are_coldest() -> None:
    """Three replicas, full, each having used its stalest 50 blocks at another time."""
    router, coldest = router_with("r1", "r2", "r3", capacity=100), {"r1": 50.0, "r2": 20.0, "r3": 80.0}
    uses = [(now, name) for name, used in coldest.items() for now in (0.0, used, 90.0)]
    for number, (now, name) in enumerate(sorted(uses)):
        router.trie.insert(name, numbered(number, 50).keys, now, weight=TOKEN_WEIGHT)
    _, ranking = router.rank(numbered(99, 50), list(coldest), 100.0)
    assert [candidate.replica for candidate in ranking] == ["r2", "r1", "r3"]
    half, whole = (router.rank(numbered(99, blocks), ["r1"], 100.0)[0].best.cost.evicted_s for blocks in (25, 50))
    assert half == pytest.approx(whole / 2), "a block for a block"


def test_only_what_does_not_fit_must_be_forgotten() -> None:
    router = router_with("r1", capacity=100)
    for number, now in ((0, 0.0), (1, 90.0), (2, 90.0)):
        router.trie.insert("r1", numbered(number, 50).keys, now, weight=TOKEN_WEIGHT)
    router.trie.add_replica("r1", 125 * TOKEN_WEIGHT)  # so that there is room for half of what comes
    half = router.rank(numbered(99, 50), R1, 90.0)[0].best.cost.evicted_s
    full = router.rank(numbered(99, 25 + 50), R1, 90.0)[0].best.cost.evicted_s
    grown = router.rank(numbered(2, 50 + 50), R1, 90.0)[0].best.cost.evicted_s
    assert half == pytest.approx(25 / 8000)
    assert full == pytest.approx(50 / 8000)
    assert grown == pytest.approx(25 / 8000), "the blocks that it holds already need no room"


def test_a_replica_with_room_forgets_nothing() -> None:
    router = router_with("full", "free", capacity=100)
    for number in range(4):
        router.trie.insert("full", numbered(number, 50).keys, float(number), weight=TOKEN_WEIGHT)
    router.trie.insert("free", numbered(9, 50).keys, 4.0, weight=TOKEN_WEIGHT)
    costs = {one.replica: one.cost for one in router.rank(numbered(99, 50), ["full", "free"], 5.0)[1]}
    assert costs["free"].evicted_s == 0 < costs["full"].evicted_s <= costs["full"].prefill_s
    known = {one.replica: one.cost for one in router.rank(numbered(3, 50), ["full", "free"], 5.0)[1]}
    assert known["full"].evicted_s == 0, "what it holds already needs no room"


# -- who comes back


def test_the_gap_between_turns_is_learned_from_conversations_and_not_from_shared_heads() -> None:
    router = router_with("r1")
    for turn in range(1, 60):
        served(router, prompt_of(b"h" * 20 + bytes([turn])), 60.0 * turn)
    assert router.ledger.turn_gap.value == pytest.approx(15.0, rel=0.1), "heads of 20 tokens"
    for turn in range(1, 60):
        served(router, prompt_of(bytes(5000 + 10 * turn)), 10_000 + 60.0 * turn)
    assert router.ledger.turn_gap.value == pytest.approx(60.0, rel=0.15)


def test_a_long_cold_prompt_goes_where_the_fewest_have_just_been_answered() -> None:
    router = router_with("r1", "r2")
    for turn in range(40):
        served(router, numbered(turn), turn / 10, name="r1" if turn < 30 else "r2")
    long, short = numbered(99, 50_000), numbered(98, 5)
    costs = {one.replica: one.cost for one in router.rank(long, BOTH, 4.0)[1]}
    assert costs["r1"].others_s > 2 * costs["r2"].others_s > 1.0
    assert Counter(router.rank(long, BOTH, 4.0)[0].best.replica for _ in range(20)) == {"r2": 20}
    assert all(one.cost.others_s < 1e-3 for one in router.rank(short, BOTH, 4.0)[1]), "a short one takes nothing from anybody"


def test_a_conversation_begins_on_the_replica_that_has_worked_less() -> None:
    """Both replicas are idle, hold the head, and have answered as many requests; r1 has computed long ones."""
    router = router_with("r1", "r2")
    for turn in range(20):
        for name, blocks in (("r1", 40_000), ("r2", 4)):
            booking = router.choose(numbered(turn, blocks), [name], 10.0 * turn)
            booking.first_token(10.0 * turn + 5.0)
            booking.close(OK, 10.0 * turn + 5.0)
    for name in BOTH:
        served(router, prompt_of(b"h" * 100), 200.0, name=name)
    begins, cold = prompt_of(b"h" * 100 + b"new"), numbered(99, 100)
    costs = {one.replica: one.cost for one in router.rank(begins, BOTH, 200.0)[1]}
    mean_s, busy = 20 * 5.0 / 42, 5.0 * sum(math.exp(-turn / 12) for turn in range(1, 21)) / BUSY_S
    assert costs["r1"].others_s - costs["r2"].others_s == pytest.approx(mean_s * (busy - FREE_SHARE), rel=0.3)
    assert Counter(router.rank(begins, BOTH, 200.0)[0].best.replica for _ in range(20)) == {"r2": 20}
    costs = {one.replica: one.cost for one in router.rank(cold, BOTH, 200.0)[1]}
    assert costs["r1"].others_s == pytest.approx(costs["r2"].others_s, rel=1e-3), "it shares nothing with any conversation"


def test_next_turns_begin_no_conversation() -> None:
    router = router_with("r1")
    for number in range(20):
        for turn in range(1, 6):
            served(router, numbered(number, 100 * turn), 0.0)
    work = router.ledger.loads["r1"].rate.pool.conversation
    assert work.returning == pytest.approx(1 - 20 / (PRIOR + 100))


def test_a_prompt_that_shares_only_a_head_is_not_a_returning_session() -> None:
    router = router_with("r1")
    served(router, prompt_of(b"h" * 20 + b"a" * 80), 0.0)
    expected = router.ledger.of("r1").answered
    router.choose(prompt_of(b"h" * 20 + b"b" * 80), R1, 0.0)
    assert router.ledger.of("r1").answered == expected
    router.choose(prompt_of(b"h" * 20 + b"a" * 120), R1, 0.0)
    assert router.ledger.of("r1").answered == expected - 1


# -- unequal replicas


def test_a_new_replica_is_believed_to_be_as_fast_as_the_fleet() -> None:
    router = router_with("r1", "r2")
    for turn in range(60):
        for name, rate in (("r1", 1000.0), ("r2", 3000.0)):
            booking = router.choose(numbered(turn, 1000), [name], 10.0 * turn)
            booking.first_token(10.0 * turn + booking.chosen.uncached_tokens / rate)
            booking.close(OK, 10.0 * turn + 5)
    router.add(Replica("r3"))
    _, ranking = router.rank(numbered(77_777, 100), ["r1", "r2", "r3"], 1000.0)
    rates = {candidate.replica: candidate.prefill_rate for candidate in ranking}
    assert rates["r3"] == pytest.approx((rates["r1"] + rates["r2"]) / 2, rel=0.1) == pytest.approx(2000, rel=0.1)


def work_of_a_slow_one(rate: float, seed: int) -> float:
    """What a replica at a quarter of the speed is given, over the mean of the three others."""
    spec = FleetSpec(replicas=4, speeds=(1.0, 1.0, 0.25, 1.0))
    placement = RouterPlacement(router_with(ttl_s=300.0), spec)
    source = dataclasses.replace(NoReuse(), hours=0.25, rate=rate).source(4, random.Random(seed))
    work = Counter[int]()
    for one in Simulation(spec, source, placement).run():
        work[one.replica] += one.request.prompt.units
    slow = work.pop(2)
    assert max(work.values()) < 1.25 * min(work.values())
    return slow / (sum(work.values()) / 3)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_replica_at_a_quarter_of_the_speed_gets_about_a_quarter_of_the_work(seed: int) -> None:
    """Of a fleet that has no time to spare; with time to spare, less: a prompt takes four times as long on it."""
    assert work_of_a_slow_one(rate=1.4, seed=seed) == pytest.approx(0.25, abs=0.05)
    assert 0.03 < work_of_a_slow_one(rate=1.0, seed=seed) < 0.2


class LateFirsts(Simulation):
    """The first tokens of replica 3's first four requests are seen 8 seconds late."""

    late = 4

    def _prefilled(self, served: ServedRequest, now: float) -> None:
        if served.replica == 3 and self.late:
            self.late -= 1
            now += 8.0
        super()._prefilled(served, now)


@pytest.mark.parametrize("seed", range(3))
def test_a_replica_that_seemed_slow_at_first_gets_its_share(seed: int) -> None:
    """There is time to spare, so that none is chosen because the others are busy."""
    source = dataclasses.replace(NoReuse(), hours=0.1, rate=0.3).source(8, random.Random(seed))
    simulation = LateFirsts(FleetSpec(replicas=8), source, RouterPlacement(router_with(ttl_s=300.0), FleetSpec(replicas=8)))
    requests = Counter(one.replica for one in simulation.run())
    assert min(requests.values()) > 0.5 * requests.total() / 8


# -- prefixes that were paid for


def test_a_prediction_is_paid_for_as_far_as_answers_for_this_client_were_counted() -> None:
    router, tenant, other = router_with("r1"), numbered(1), numbered(1)
    tenant.origin, other.origin = 1, 2
    router.choose(other, R1, 0.0).close(Outcome(True, 10), 0.0)
    booking = router.choose(tenant, R1, 1.0)
    assert (booking.chosen.matched_tokens, booking.paid_tokens) == (10, 0), "others have put it there"
    booking.close(Outcome(ok=False), 1.0)
    assert router.choose(tenant, R1, 2.0).paid_tokens == 0, "it was refused"
    router.choose(tenant, R1, 2.0).close(Outcome(True, 10), 2.0)
    assert router.choose(tenant, R1, 3.0).paid_tokens == 10
    assert router.choose(tenant, R1, 3.0).chosen.matched_tokens == 10
    reporting = numbered(2)
    router.choose(reporting, R1, 4.0).close(Outcome(True, 10, 0), 4.0)
    assert router.choose(reporting, R1, 5.0).paid_tokens == 0, "the engine reports what was cached"
    router.purge("r1")
    assert router.choose(tenant, R1, 6.0).paid_tokens == 0
    router.check()


@pytest.mark.parametrize(
    ("first", "reservable"),
    [(None, 10), (Outcome(True, 10), 0), (Outcome(True, 10, 0), 10), (Outcome(True), 10)],
    ids=["nothing yet", "no cached tokens", "cached tokens", "no usage"],
)
def test_a_prediction_is_reserved_as_cached_unless_the_replica_reports_no_cached_tokens(
    first: Outcome | None, reservable: int
) -> None:
    router, tenant, other, another = router_with("r1"), numbered(1), numbered(1), numbered(2)
    tenant.origin, other.origin, another.origin = 1, 2, 2
    if first is not None:
        router.choose(another, R1, 0.0).close(first, 0.0)
    router.trie.insert("r1", other.keys, 0.0)
    assert router.choose(tenant, R1, 1.0).reservable_tokens == reservable
    router.choose(numbered(3), R1, 1.0).close(Outcome(True, 10, 0), 1.0)
    router.choose(numbered(4), R1, 1.0).close(Outcome(True, 10), 1.0)
    assert router.choose(tenant, R1, 2.0).reservable_tokens == 10, "an engine may leave out a zero"


def test_paid_prefixes_follow_the_memory_of_the_index() -> None:
    paid, newcomer = PaidPrefixes(100.0, 1 << 24), numbered(0)
    for number in range(1, 200):
        prompt = numbered(number)
        paid.add("r1", prompt, prompt.keys, 0.0)
    before = paid.trie.size_bytes
    while paid.resize(1 << 16, 1000):
        paid.add("r1", newcomer, newcomer.keys, 1.0)
    paid.add("r1", newcomer, newcomer.keys, 1.0)
    assert paid.trie.size_bytes <= (1 << 16) // MEMORY_SHARE < before
    assert not paid.resize(1 << 24)
    assert paid.trie.max_bytes == (1 << 24) // MEMORY_SHARE
    paid.check()


def test_a_prediction_is_paid_for_as_far_as_the_count_reached() -> None:
    router, tenant, other = router_with("r1"), numbered(1), numbered(1)
    tenant.origin, other.origin = 1, 2
    router.choose(other, R1, 0.0).close(Outcome(True, 10), 0.0)
    router.choose(tenant, R1, 1.0).close(Outcome(True, 3), 1.0)
    booking = router.choose(tenant, R1, 2.0)
    assert (booking.chosen.matched_tokens, booking.paid_tokens) == (10, 3)


def test_a_replica_that_left_has_no_paid_prefixes_when_it_is_back() -> None:
    router, tenant, other = router_with("r1", "r2"), numbered(1), numbered(1)
    tenant.origin, other.origin = 1, 2
    for name in ("r1", "r2"):
        router.choose(tenant, [name], 0.0).close(Outcome(True, 10), 0.0)
    router.remove("r1")
    router.add(Replica("r1"))
    router.choose(other, R1, 1.0).close(Outcome(True, 10), 1.0)
    booking = router.choose(tenant, R1, 2.0)
    assert (booking.chosen.matched_tokens, booking.paid_tokens) == (10, 0)
    assert router.choose(tenant, ["r2"], 2.0).paid_tokens == 10
    router.check()


def test_holders_of_paid_prefixes_are_bounded() -> None:
    paid = PaidPrefixes(100.0, 1 << 22)
    for origin in range(MAX_HOLDERS + 10):
        prompt = numbered(1)
        prompt.origin = origin
        paid.add("r1", prompt, prompt.keys, 0.0)
    prompt.origin = 0
    assert paid.blocks("r1", prompt, 0.0) == 0
    prompt.origin = MAX_HOLDERS
    assert paid.blocks("r1", prompt, 0.0) == 10
    paid.trie.sweep(0.0, 10**6)
    paid.check()
