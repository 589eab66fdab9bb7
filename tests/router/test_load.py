from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from router.load import ARRIVAL_WINDOW_S, DEFAULT_PREFILL_RATE, Lease, Ledger, ReplicaLoad
from tests.strategies import replicas


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, repeated and late ones too; the expected counts are recomputed from the leases themselves."""

    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.ledger, self.now = Ledger(), 0.0
        self.all: list[Lease] = []

    @rule(target=leases, replica=replicas, tokens=st.integers(0, 5000), silent=st.booleans())
    def open(self, replica: str, tokens: int, silent: bool) -> Lease:
        self.all.append(self.ledger.open(replica, tokens, self.now, silent=silent))
        return self.all[-1]

    @rule(replica=replicas)
    def settle(self, replica: str) -> None:
        self.ledger.of(replica).settle(self.now)

    @rule(lease=leases)
    def first_token(self, lease: Lease) -> None:
        lease.first_token(self.now)

    @rule(lease=leases, replica=replicas, tokens=st.integers(0, 5000))
    def move(self, lease: Lease, replica: str, tokens: int) -> None:
        lease.move(replica, tokens, self.now)

    @rule(lease=leases)
    def close(self, lease: Lease) -> None:
        was_open = not lease.closed
        assert lease.close(self.now) is was_open

    @rule(replica=replicas)
    def remove(self, replica: str) -> None:
        self.ledger.remove(replica)

    @rule(seconds=st.floats(-2, 10))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_are_those_of_the_open_leases(self) -> None:
        self.ledger.check()
        for name in ("r1", "r2", "r3"):
            here = [lease for lease in self.all if not lease.closed and lease.replica == name]
            load = self.ledger.of(name)
            assert load.inflight == len(here)
            assert load.decoding == sum(lease.decoding for lease in here)
            assert load.booked_tokens == sum(lease.uncached_tokens for lease in here if not lease.decoding)
            assert 0 <= load.remaining_tokens(self.now) <= load.booked_tokens


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=40)


def test_a_prefill_is_timed_from_its_turn_in_the_queue() -> None:
    """Three prompts at once, served one after the other at 1000 tokens/s."""
    ledger = Ledger()
    leases = [ledger.open("r", tokens, 100.0) for tokens in (2000, 500, 1000)]
    for lease, now in zip(leases, (102.0, 102.5, 103.5), strict=True):
        lease.first_token(now)
    assert [lease.prefill_s for lease in leases] == [2.0, 0.5, 1.0]


def test_what_is_left_of_the_queue_shrinks_while_the_first_prompt_is_prefilled() -> None:
    ledger = Ledger()
    first, second, third = (ledger.open("r", tokens, 100.0) for tokens in (80_000, 1000, 16_000))
    load = ledger.of("r")
    assert [load.remaining_tokens(now) for now in (50.0, 100.0, 105.0)] == [97_000, 97_000, 57_000]
    assert load.remaining_tokens(200.0) == 17_000, "at most all of the first: the next has not begun, or we would have heard"
    first.first_token(120.0)
    second.close(121.0)  # its client left while it was its turn
    assert [load.remaining_tokens(now) for now in (121.0, 122.0)] == [16_000, 8000]
    third.close(122.0)
    assert load.remaining_tokens(123.0) == 0


def test_a_plain_answer_decodes_when_its_prefill_must_be_over() -> None:
    ledger = Ledger()
    plain = [ledger.open("r", 8000, 0.0, silent=True) for _ in range(3)]  # a second each, at the believed rate
    streamed = ledger.open("r", 8000, 0.0)
    ledger.open("r", 8000, 0.0, silent=True)
    load = ledger.of("r")
    for now, decoding, left in ((0.5, 0, 36_000), (1.5, 1, 28_000), (2.0, 2, 24_000), (3.5, 3, 12_000), (100.0, 3, 8000)):
        load.settle(now)
        assert (load.decoding, load.remaining_tokens(now)) == (decoding, left)
    assert all(lease.prefill_s is None for lease in plain), "an assumption teaches nothing"
    streamed.first_token(101.0)
    assert streamed.prefill_s == 98.0, "its turn began when the plain ones must have been through"


def test_one_that_leaves_the_middle_of_the_queue_ends_nobodys_turn() -> None:
    ledger = Ledger()
    _, second = ledger.open("r", 80_000, 0.0), ledger.open("r", 1000, 0.0)
    second.close(5.0)
    assert ledger.of("r").remaining_tokens(5.0) == 40_000


def test_arrivals_are_counted_and_fade() -> None:
    load = ReplicaLoad()
    assert load.arrival_rate(5.0) == 0
    for second in range(600):
        load.count_arrival(second / 2)
    assert load.arrival_rate(300.0) == pytest.approx(2.0, rel=0.02)
    assert load.arrival_rate(300.0 + ARRIVAL_WINDOW_S) == pytest.approx(2.0 / 2.718, rel=0.02)
    assert load.arrival_rate(-100.0) > 0, "a clock that jumps back is no reason to forget"


def test_the_rate_follows_a_replica_that_slows_down() -> None:
    load = ReplicaLoad()
    assert load.prefill_rate == DEFAULT_PREFILL_RATE
    for seconds in [0.5] * 50 + [2.0] * 150:
        load.learn(1000, seconds)
    assert load.prefill_rate == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize(("tokens", "seconds"), [(1000, 0.0), (1000, -3.0), (0, 1.0), (-5, 1.0)])
def test_nonsense_teaches_nothing(tokens: int, seconds: float) -> None:
    load = ReplicaLoad()
    load.learn(tokens, seconds)
    assert load.prefill_rate == DEFAULT_PREFILL_RATE


def test_a_busy_replica_that_left_keeps_its_count_until_its_leases_are_home() -> None:
    ledger = Ledger()
    lease = ledger.open("r", 10, 0.0)
    ledger.remove("r")
    assert ledger.open_leases == 1
    lease.close(0.0)
    ledger.remove("r")
    assert repr(ledger) == "<Ledger >"
