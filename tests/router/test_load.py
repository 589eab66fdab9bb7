from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from router.load import DEFAULT_PREFILL_RATE, Lease, Ledger
from tests.strategies import replicas


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, repeated and late ones too; the expected counts are recomputed from the leases themselves."""

    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.ledger, self.now = Ledger(), 0.0
        self.all: list[Lease] = []

    @rule(target=leases, replica=replicas, tokens=st.integers(0, 5000))
    def open(self, replica: str, tokens: int) -> Lease:
        self.all.append(self.ledger.open(replica, tokens, self.now))
        return self.all[-1]

    @rule(lease=leases)
    def first_token(self, lease: Lease) -> None:
        lease.first_token(self.now)

    @rule(lease=leases, replica=replicas, tokens=st.integers(0, 5000))
    def move(self, lease: Lease, replica: str, tokens: int) -> None:
        lease.move(replica, tokens, self.now)

    @rule(lease=leases)
    def close(self, lease: Lease) -> None:
        was_open = not lease.closed
        assert lease.close() is was_open

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


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=40)


def test_the_rate_is_learned_from_service_times_also_in_a_queue() -> None:
    ledger = Ledger()
    assert ledger.of("r").prefill_rate == DEFAULT_PREFILL_RATE
    for batch in range(40):  # three prompts at once, served one after the other at 1000 tokens/s
        start = batch * 100.0
        for place, lease in enumerate([ledger.open("r", 2000, start) for _ in range(3)], 1):
            lease.first_token(start + place * 2.0)
            lease.close()
    assert ledger.of("r").prefill_rate == pytest.approx(1000, rel=0.05)


def test_the_rate_follows_a_replica_that_slows_down() -> None:
    ledger = Ledger()
    for turn, seconds in enumerate([0.5] * 50 + [2.0] * 150):
        lease = ledger.open("r", 1000, turn * 10.0)
        lease.first_token(turn * 10.0 + seconds)
        lease.close()
    assert ledger.of("r").prefill_rate == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -3.0])
def test_a_clock_that_stands_still_teaches_nothing(seconds: float) -> None:
    ledger = Ledger()
    ledger.open("r", 1000, 10.0).first_token(10.0 + seconds)
    assert ledger.of("r").prefill_rate == DEFAULT_PREFILL_RATE


def test_a_busy_replica_that_left_keeps_its_count_until_its_leases_are_home() -> None:
    ledger = Ledger()
    lease = ledger.open("r", 10, 0.0)
    ledger.remove("r")
    assert ledger.open_leases == 1
    lease.close()
    ledger.remove("r")
    assert repr(ledger) == "<Ledger >"
