from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, invariant, rule

from router.learning.foreign import BUSY_S
from router.load import BookingLedger, Lease
from tests.support.machines import STEPS, CountedMachine, steps_of
from tests.support.strategies import replicas


class LedgerMachine(CountedMachine):
    """Any order of events, repeated and late ones too; the expected counts are recomputed from the leases themselves."""

    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.ledger, self.now = BookingLedger(), 0.0
        self.all: list[Lease] = []

    @rule(
        target=leases,
        replica=replicas,
        tokens=st.integers(0, 5000),
        silent=st.booleans(),
        remote=st.booleans(),
        sequences=st.integers(1, 3),
    )
    def open(self, replica: str, tokens: int, silent: bool, remote: bool, sequences: int) -> Lease:
        self.all.append(self.ledger.open(replica, tokens + 5, tokens, self.now, silent=silent, remote=remote))
        self.all[-1].widen(sequences)
        return self.all[-1]

    @rule(replica=replicas)
    def settle(self, replica: str) -> None:
        self.ledger.of(replica).advance(self.now)

    @rule(lease=leases)
    def first_token(self, lease: Lease) -> None:
        lease.first_token(self.now)

    @rule(lease=leases, replica=replicas, tokens=st.integers(0, 5000))
    def move(self, lease: Lease, replica: str, tokens: int) -> None:
        lease.move(replica, tokens + 7, tokens, self.now)

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
            assert load.sequences == sum(lease.sequences for lease in here)
            assert load.remote_further == sum(lease.sequences - 1 for lease in here if lease.remote)
            assert load.active_tokens == sum(lease.prompt_tokens for lease in here)
            assert load.decoding == sum(lease.decoding for lease in here)
            assert load.booked_tokens == sum(lease.uncached_tokens for lease in here if not lease.decoding)
            assert 0 <= load.remaining_tokens(self.now) <= load.booked_tokens
            assert load.own_inflight == sum(not lease.remote for lease in here)
            own = sum(lease.uncached_tokens for lease in here if not (lease.decoding or lease.remote))
            assert load.own_booked_tokens == own
            assert 0 <= load.own_remaining_tokens(self.now) <= own
            assert set(load.waiting) == {lease for lease in here if not lease.decoding}
            assert 0 <= load.answered <= sum(lease.closed for lease in self.all)
            assert load.return_rate(self.now, 15.0) >= 0


def test_no_order_of_events_makes_a_count_wrong() -> None:
    assert steps_of(LedgerMachine, examples=270, steps=50) >= STEPS


def test_a_prefill_is_timed_from_its_turn_in_the_queue() -> None:
    """Three prompts at once, served one after the other at 1000 tokens/s."""
    ledger = BookingLedger()
    leases = [ledger.open("r", tokens, tokens, 100.0) for tokens in (2000, 500, 1000)]
    for lease, now in zip(leases, (102.0, 102.5, 103.5), strict=True):
        lease.first_token(now)
    assert [lease.prefill_s for lease in leases] == [2.0, 0.5, 1.0]


def test_what_is_left_of_the_queue_shrinks_while_the_first_prompt_is_prefilled() -> None:
    ledger = BookingLedger()
    first, second, third = (ledger.open("r", tokens, tokens, 100.0) for tokens in (80_000, 1000, 16_000))
    load = ledger.of("r")
    assert [load.remaining_tokens(now) for now in (50.0, 100.0, 105.0)] == [97_000, 97_000, 57_000]
    assert load.remaining_tokens(200.0) == 17_000, "at most all of the first: the next has not begun, or we had its first token"
    first.first_token(120.0)
    second.close(121.0)  # its client left while it was its turn
    assert [load.remaining_tokens(now) for now in (121.0, 122.0)] == [16_000, 8000]
    third.close(122.0)
    assert load.remaining_tokens(123.0) == 0


def test_a_plain_answer_decodes_when_its_prefill_must_be_over() -> None:
    ledger = BookingLedger()
    plain = [ledger.open("r", 8000, 8000, 0.0, silent=True) for _ in range(3)]  # a second each, at the believed rate
    streamed = ledger.open("r", 8000, 8000, 0.0)
    ledger.open("r", 8000, 8000, 0.0, silent=True)
    load = ledger.of("r")
    for now, decoding, left in ((0.5, 0, 36_000), (1.5, 1, 28_000), (2.0, 2, 24_000), (3.5, 3, 12_000), (100.0, 3, 8000)):
        load.advance(now)
        assert (load.decoding, load.remaining_tokens(now)) == (decoding, left)
    assert all(lease.prefill_s is None for lease in plain), "an assumption teaches nothing"
    streamed.first_token(101.0)
    assert streamed.prefill_s == 98.0, "its turn began when the plain ones must have been through"


def test_a_plain_request_that_is_chosen_again_gives_those_behind_it_no_earlier_turn() -> None:
    ledger = BookingLedger()
    first, second = (ledger.open("r", tokens, tokens, 0.0, silent=True) for tokens in (80_000, 8000))
    first.withdraw(5.0)
    assert ledger.of("r").advance(5.5) is second
    assert ledger.of("r").advance(6.5) is None


def test_one_that_leaves_the_middle_of_the_queue_ends_nobodys_turn() -> None:
    ledger = BookingLedger()
    _, second = ledger.open("r", 80_000, 80_000, 0.0), ledger.open("r", 1000, 1000, 0.0)
    second.close(5.0)
    assert ledger.of("r").remaining_tokens(5.0) == 40_000


def test_an_answered_client_is_expected_back_about_a_turns_gap_later() -> None:
    load, gap = BookingLedger().of("r"), 20.0
    assert load.return_rate(5.0, gap) == 0
    for second in range(600):
        load.count_answer(second / 2, gap)
    assert load.return_rate(299.5, gap) == pytest.approx(2.0, rel=0.02), "as many come as were answered"
    assert load.return_rate(299.5 + gap, gap) == pytest.approx(2.0 / math.e, rel=0.02), "and fewer the longer nobody was"
    assert load.return_rate(299.5, 2 * gap) == pytest.approx(1.0, rel=0.02), "the same users, in twice the time"
    assert load.return_rate(-100.0, gap) == load.return_rate(299.5, gap), "a clock that jumps back is no reason to forget"
    load.count_answer(-100.0, gap)
    assert load.answered_at == 299.5, "nor to begin anew"


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0.5, 300), st.floats(0, 100))
def test_returns_are_a_sum_over_all_answers_in_constant_memory(gaps: list[float], gap: float, later: float) -> None:
    load, now, answers = BookingLedger().of("r"), 0.0, []
    for pause in gaps:
        now += pause
        answers.append(now)
        load.count_answer(now, gap)
    now += later
    assert load.return_rate(now, gap) == pytest.approx(sum(math.exp((at - now) / gap) for at in answers) / gap)


def test_a_client_that_is_back_is_no_longer_expected() -> None:
    load, gap = BookingLedger().of("r"), 20.0
    for now in (0.0, 5.0, 10.0):
        load.count_answer(now, gap)
    load.count_return(12.0, gap, idle_s=7.0)
    assert load.return_rate(12.0, gap) == pytest.approx((math.exp(-12 / gap) + math.exp(-2 / gap)) / gap), "the one of second 5"
    for _ in range(9):
        load.count_return(12.0, gap, idle_s=0.0)
    assert load.return_rate(12.0, gap) == 0.0, "never fewer than nobody"
    load.count_return(-50.0, gap, idle_s=0.0)
    assert load.answered_at == 12.0


def test_one_that_extends_another_s_head_is_nobody_s_next_turn() -> None:
    ledger = BookingLedger()
    ledger.open("r", 10, 10, 0.0).close(0.0)
    ledger.record_return(ledger.of("r"), 40.0, weight=1.0, next_turn=False, now=40.0)
    before = ledger.of("r").return_rate(40.0, 20.0)
    ledger.record_return(ledger.of("r"), 40.0, weight=0.0, next_turn=True, now=40.0)
    assert before > 0 == ledger.of("r").return_rate(40.0, 20.0)
    assert ledger.turn_gap.value == pytest.approx(15.0 * math.exp(0.1)), "both are seen, as far as they weigh"


def test_only_a_lease_that_closes_counts_as_an_answer_and_only_where_it_ended() -> None:
    ledger = BookingLedger()
    lease = ledger.open("left", 10, 10, 0.0)
    lease.first_token(1.0)
    lease.move("right", 10, 10, 2.0)
    assert lease.prefill_s is None, "the time is of the other replica"
    assert (ledger.of("left").answered, ledger.of("right").answered) == (0, 0)
    lease.close(3.0)
    lease.close(4.0)
    assert (ledger.of("left").answered, ledger.of("right").answered) == (0, 1)
    assert ledger.of("right").answered_at == 3.0


def test_the_ledgers_own_gap_fades_what_its_leases_count() -> None:
    ledger = BookingLedger()
    ledger.turn_gap.value = 5.0
    for now in (0.0, 5.0):
        ledger.open("r", 10, 10, now).close(now)
    assert ledger.of("r").answered == pytest.approx(1 + 1 / math.e)


def test_a_look_at_a_stranger_books_nothing() -> None:
    ledger = BookingLedger()
    ledger.of("r").advance(0.0)
    assert repr(ledger) == "<Ledger >"


def test_a_busy_replica_that_left_keeps_its_count_until_its_leases_are_home() -> None:
    ledger = BookingLedger()
    lease = ledger.open("r", 10, 10, 0.0)
    ledger.remove("r")
    assert ledger.open_leases == 1
    lease.close(0.0)
    ledger.remove("r")
    assert repr(ledger) == "<Ledger >"


def test_a_replica_is_busy_no_longer_than_a_request_has_waited() -> None:
    """Ten seconds of work by the estimate of its tokens, of which it takes one."""
    ledger = BookingLedger()
    lease = ledger.open("r", 80_000, 80_000, 0.0)
    lease.first_token(1.0)
    assert lease.load.busy(1.0) * BUSY_S == pytest.approx(1.0)


def test_no_time_counts_twice_as_work() -> None:
    """A second of work is computed within ten of another request; then three have ten each by their tokens, and take one."""
    ledger = BookingLedger()
    long = ledger.open("r", 80_000, 80_000, 0.0)
    ledger.open("r", 8000, 8000, 5.0).first_token(6.0)
    long.first_token(11.0)
    assert long.load.busy(11.0) * BUSY_S == pytest.approx(math.exp(-5 / BUSY_S) + 10.0)
    for lease in [ledger.open("r", 80_000, 80_000, 11.0) for _ in range(3)]:
        lease.first_token(12.0)
    assert long.load.busy(12.0) * BUSY_S == pytest.approx(math.exp(-6 / BUSY_S) + 10.0 * math.exp(-1 / BUSY_S) + 1.0)
