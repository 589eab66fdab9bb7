from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from gateway.fleet.breaker import Breaker, BreakerRules, Trial
from gateway.fleet.refusals import REFUSALS_WINDOW_S, REFUSED_CLIENTS, Refusals
from gateway.fleet.state import EXTRA_PROBES, ProbeBudget
from gateway.request.retries import RetryBudget, jitter
from tests.support.machines import STEPS, CountedMachine, steps_of


class Always(Random):
    """Chance that is always the same."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


# -- retries


@given(st.sampled_from([0.0, 0.125, 0.25, 1.0]), st.integers(1, 5), st.lists(st.booleans(), max_size=200))
def test_retries_are_a_share_of_the_requests_and_a_reserve(ratio: float, burst: int, story: list[bool]) -> None:
    budget, left, requests, retries = RetryBudget(ratio, burst), float(burst), 0, 0
    for is_request in story:
        if is_request:
            requests += 1
            left = min(burst, left + ratio)
            budget.request()
        else:
            assert budget.take() is (left >= 1)
            retries += left >= 1
            left -= left >= 1
        assert retries <= ratio * requests + burst


def test_a_budget_comes_back_with_the_requests() -> None:
    budget = RetryBudget(burst=10)
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(5):
        budget.request()
    assert (budget.take(), budget.take()) == (True, False)
    for _ in range(1000):
        budget.request()
    assert repr(budget) == "<RetryBudget 10 of 10>"


def test_the_pause_before_a_retry_doubles_up_to_a_quarter_of_a_second() -> None:
    most = [jitter(attempt, Always(1.0)) for attempt in (1, 2, 3, 4, 5, 100_000)]
    assert most == [0.025, 0.05, 0.1, 0.2, 0.25, 0.25]
    assert jitter(3, Always(0.0)) == 0.0
    assert jitter(3, Always(0.5)) == 0.05
    assert [jitter(attempt, Always(1.0), at_once=True) for attempt in (1, 2)] == [0.0, 0.05]


# -- the breaker


@dataclass(eq=False)
class Sent:
    """era: the model's when it was sent; None if it was sent though it was not allowed."""

    attempt: Trial
    era: int | None


class BreakerMachine(CountedMachine):
    """The breaker against a model that keeps every outcome. Attempts end in any order, late and repeatedly too."""

    @initialize(
        failures=st.integers(1, 4),
        failed_share=st.sampled_from([0.25, 0.5, 0.7]),
        least=st.integers(1, 6),
        window=st.integers(6, 8),
        needed=st.integers(1, 2),
        chance=st.floats(0, 1, exclude_max=True),
    )
    def start(self, failures: int, failed_share: float, least: int, window: int, needed: int, chance: float) -> None:
        self.rules = BreakerRules(failures, failed_share, least, window, needed)
        self.chance = chance
        self.breaker = Breaker(Always(chance), self.rules)
        self.now, self.retry_at = 100.0, 0.0
        self.opened = self.good = self.era = self.unanswered = 0
        self.probe: Sent | None = None  # it has the slot, until then
        self.probe_until = 0.0
        self.outcomes: list[bool] = []  # since it closed; True: failed
        self.row = 0  # of them failed
        self.sent: list[Sent] = []
        self.began: list[tuple[Trial, int, int]] = []  # well; the era, how often it was open before
        self.judged: list[Trial] = []

    @property
    def allowed(self) -> bool:
        free = self.probe is None or self.now >= self.probe_until
        return not self.opened or (self.now >= self.retry_at and free)

    def no_probe(self) -> None:
        self.probe, self.unanswered, self.good = None, 0, 0

    @rule()
    def begin(self) -> None:
        allowed = self.allowed
        sent = Sent(self.breaker.begin(self.now), self.era if allowed else None)
        self.sent.append(sent)
        if self.opened and allowed:
            self.unanswered += self.probe is not None
            self.probe = sent
            self.probe_until = self.now + min(30.0, 2.0 ** (self.opened - 1 + self.unanswered))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def answers(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.sent))
        sent.attempt.answers()
        if self.probe is sent:
            self.probe = None

    def judge(self, data: st.DataObject) -> tuple[Trial, bool]:
        """One that is under way, and whether its verdict counts."""
        sent = data.draw(st.sampled_from(self.sent))
        self.sent.remove(sent)
        self.judged.append(sent.attempt)
        if self.probe is sent:
            self.probe = None
        return sent.attempt, sent.era == self.era

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def success(self, data: st.DataObject) -> None:
        attempt, counts = self.judge(data)
        attempt.success()
        if not counts:
            return
        before = 0
        if not self.opened:
            self.outcomes.append(False)
            self.row = 0
        else:
            self.good += 1
            if self.good == self.rules.needed:
                before = self.opened
                self.opened, self.outcomes, self.row = 0, [], 0
                self.era += 1
                self.no_probe()
        self.judged.remove(attempt)
        self.began.append((attempt, self.era, before))

    @precondition(lambda self: self.began)
    @rule(data=st.data())
    def breaks_off(self, data: st.DataObject) -> None:
        began = data.draw(st.sampled_from(self.began))
        self.began.remove(began)
        attempt, era, before = began
        self.judged.append(attempt)
        attempt.broke_off(self.now)
        if era != self.era:
            return
        if not self.opened and len(self.outcomes) < self.rules.least:
            self.opened = before
        recent = self.outcomes[-self.rules.window :]
        if not self.opened and False in recent:
            last = len(self.outcomes) - 1 - self.outcomes[::-1].index(False)
            self.outcomes[last] = True
        if self.opened or self.too_many():
            self.open()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def failure(self, data: st.DataObject) -> None:
        attempt, counts = self.judge(data)
        attempt.failure(self.now)
        if not counts:
            return
        self.outcomes.append(True)
        self.row += 1
        if self.opened or self.row == self.rules.failures or self.too_many():
            self.open()

    def too_many(self) -> bool:
        recent = self.outcomes[-self.rules.window :]
        return len(recent) >= self.rules.least and sum(recent) / len(recent) > self.rules.failed_share

    def open(self) -> None:
        self.retry_at = self.now + min(30.0, 2.0**self.opened) * (0.75 + 0.25 * self.chance)
        self.opened += 1
        self.era += 1
        self.no_probe()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abandoned(self, data: st.DataObject) -> None:
        self.judge(data)[0].abandoned()

    @precondition(lambda self: self.judged)
    @rule(data=st.data())
    def judge_again(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.judged))
        attempt.answers()
        attempt.abandoned()
        attempt.failure(self.now)
        attempt.success()
        attempt.broke_off(self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 8.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def it_is_the_model(self) -> None:
        self.breaker.check()
        state = "closed" if not self.opened else "open" if self.now < self.retry_at else "half_open"
        assert self.breaker.state(self.now) == state
        assert self.breaker.allows(self.now) is self.allowed
        assert self.breaker.retry_at == pytest.approx(self.retry_at) or self.retry_at == 0.0

    def teardown(self) -> None:
        """Whatever has happened: a replica that answers is used again."""
        if not hasattr(self, "breaker"):
            return
        for sent in self.sent:
            sent.attempt.abandoned()
        now = max(self.now, self.breaker.retry_at)
        for _ in range(self.rules.needed):
            assert self.breaker.allows(now)
            self.breaker.begin(now).success()
        assert self.breaker.state(now) == "closed"


def test_a_breaker_behaves_as_its_model() -> None:
    assert steps_of(BreakerMachine, examples=100, steps=200) >= STEPS


def opened(breaker: Breaker, now: float) -> None:
    """Five failures in a row."""
    for _ in range(5):
        breaker.begin(now).failure(now)


def test_failures_in_a_row_open_it_and_a_good_probe_closes_it() -> None:
    breaker = Breaker(Always(1.0))
    opened(breaker, 10.0)
    assert (breaker.state(10.9), breaker.allows(10.9), breaker.retry_at) == ("open", False, 11.0)
    assert repr(breaker) == "<Breaker opened 1 times in a row, until 11.000>"
    assert (breaker.state(11.0), breaker.allows(11.0)) == ("half_open", True)
    probe = breaker.begin(11.0)
    assert not breaker.allows(11.0)
    assert (repr(probe), repr(breaker)) == ("<Trial under way>", "<Breaker opened 1 times in a row, until 11.000, probing>")
    probe.success()
    assert (breaker.state(11.0), breaker.allows(11.0)) == ("closed", True)
    assert (repr(probe), repr(breaker)) == ("<Trial judged>", "<Breaker closed, 0 of 0 failed>")


def test_a_success_between_them_breaks_the_row_but_not_the_share() -> None:
    breaker = Breaker(Always(1.0))
    for number in range(1, 100):
        breaker.begin(0.0).success() if number % 3 == 0 else breaker.begin(0.0).failure(0.0)
        if breaker.state(0.0) == "open":
            break
    assert number == 20, "two of three failed, and there are twenty of them"


def test_the_back_off_doubles_with_every_failed_probe_and_is_forgotten_with_a_good_one() -> None:
    breaker, now, waits = Breaker(Always(1.0)), 0.0, []
    opened(breaker, now)
    for _ in range(1100):
        waits.append(breaker.retry_at - now)
        now = breaker.retry_at
        breaker.begin(now).failure(now)
    assert waits[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert waits[-1] == 30.0
    now = breaker.retry_at
    breaker.begin(now).success()
    opened(breaker, now)
    assert breaker.retry_at == now + 1.0


def test_answers_that_break_off_count_for_the_share_and_not_for_the_row() -> None:
    breaker, count = Breaker(Always(1.0)), 0
    while breaker.state(0.0) == "closed":
        attempt, count = breaker.begin(0.0), count + 1
        attempt.success()
        attempt.broke_off(0.0)
        attempt.broke_off(0.0)  # once is enough
    assert count == 20
    breaker = Breaker(Always(1.0))
    for number in range(100):
        attempt = breaker.begin(0.0)
        attempt.success()
        if number % 2:
            attempt.broke_off(0.0)
    assert breaker.state(0.0) == "closed", "no more than half of them"


def test_a_probe_whose_answer_breaks_off_failed() -> None:
    breaker, now, waits = Breaker(Always(1.0)), 0.0, []
    opened(breaker, now)
    for _ in range(4):
        waits.append(breaker.retry_at - now)
        now = breaker.retry_at
        probe = breaker.begin(now)
        probe.success()
        assert breaker.state(now) == "closed"
        now += 0.5
        probe.broke_off(now)
        assert breaker.state(now) == "open"
    assert waits == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("others", [0, 19, 20, 10_000])
def test_a_probe_whose_answer_breaks_off_when_others_have_answered_is_one_of_many(others: int) -> None:
    """From twenty answers on their share decides, and what was before the breaker closed is forgotten."""
    breaker = Breaker(Always(1.0))
    opened(breaker, 0.0)
    probe = breaker.begin(1.0)
    probe.success()
    for _ in range(others):
        breaker.begin(1.0).success()
    probe.broke_off(1.0)
    breaker.check()
    assert repr(breaker) == (
        "<Breaker opened 2 times in a row, until 3.000>"
        if others < 20
        else f"<Breaker closed, 1 of {min(others, BreakerRules().window)} failed>"
    )


def test_chance_takes_up_to_a_quarter_off_the_back_off() -> None:
    breaker = Breaker(Always(0.0))
    opened(breaker, 0.0)
    assert breaker.retry_at == 0.75


def test_a_hundred_requests_that_die_together_open_it_once() -> None:
    breaker = Breaker(Always(1.0))
    under_way = [breaker.begin(0.0) for _ in range(100)]
    for attempt in under_way[:90]:
        attempt.failure(0.0)
    assert breaker.retry_at == 1.0
    breaker.begin(1.0)
    for attempt in under_way[90:]:
        attempt.success()
    assert breaker.state(1.0) == "half_open", "requests sent before show nothing of the replica now"


def test_a_probe_whose_client_left_makes_room_for_another() -> None:
    breaker = Breaker(Always(1.0))
    opened(breaker, 0.0)
    breaker.begin(1.0).abandoned()
    assert (breaker.state(1.0), breaker.allows(1.0)) == ("half_open", True)


def test_a_probe_that_begins_to_answer_makes_room_for_another() -> None:
    breaker = Breaker(Always(1.0))
    opened(breaker, 0.0)
    long = breaker.begin(1.0)
    assert not breaker.allows(1.0)
    long.answers()
    assert (breaker.state(1.0), breaker.allows(1.0)) == ("half_open", True)
    breaker.begin(1.0).success()
    long.failure(2.0)
    assert breaker.state(2.0) == "closed", "the long one began before it closed"


def test_silent_probes_hold_the_slot_for_the_back_off_and_longer_each_time() -> None:
    breaker, now, waits = Breaker(Always(1.0)), 1.0, []
    opened(breaker, 0.0)
    for _ in range(8):
        assert breaker.allows(now)
        breaker.begin(now)
        later = next(seconds for seconds in range(1, 100) if breaker.allows(now + seconds))
        waits.append(later)
        now += later
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    breaker.begin(now).success()
    assert breaker.state(now) == "closed"


# -- looks


def test_looks_are_three_at_once_and_then_one_per_interval() -> None:
    looks = ProbeBudget()
    assert repr(looks) == "<ProbeBudget 3 of 3>"
    assert [looks.take(10.0, 2.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert [looks.take(now, 2.0) for now in (11.0, 11.9, 12.0, 12.1, 14.0)] == [False, False, True, False, True]
    assert [looks.take(1000.0, 2.0) for _ in range(4)] == [True] * 3 + [False], "no more are saved up"


@given(st.lists(st.floats(0, 5), max_size=200), st.sampled_from([0.5, 2.0, 30.0]))
def test_looks_are_bounded(pauses: list[float], interval_s: float) -> None:
    looks, now, taken = ProbeBudget(), 0.0, 0
    for pause in pauses:
        now += pause
        taken += looks.take(now, interval_s)
        assert taken <= EXTRA_PROBES + now / interval_s + 1e-6


# -- refusals


def test_one_clients_refusals_are_about_this_client() -> None:
    refusals = Refusals()
    assert [refusals.refused(1, 60.0, now / 10) for now in range(100)] == [0.0] * 100
    assert refusals.refused(2, 60.0, 10.0) == 0.0
    assert repr(refusals) == "<Refusals of 2 clients, 101 refused, 0 answered>"


def test_refusals_of_several_clients_are_about_the_replica() -> None:
    refusals = Refusals()
    assert not refusals
    assert [refusals.refused(client, rest_s, 0.0) for client, rest_s in ((1, 60.0), (2, 7.0), (3, 30.0))] == [0, 0, 7.0]
    assert not refusals, "and the next rest needs several clients again"


def test_refusals_far_apart_are_not_of_one_overload() -> None:
    refusals = Refusals()
    assert [refusals.refused(client, 60.0, client * REFUSALS_WINDOW_S) for client in range(50)] == [0.0] * 50


def test_a_replica_that_answers_most_requests_is_not_overloaded() -> None:
    refusals = Refusals()
    for client in range(100):
        assert refusals.refused(client, 60.0, 0.0) == 0.0
        refusals.answered()
        refusals.answered()


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 4), st.integers(1, 60)), max_size=60))
def test_refusals_against_a_list_of_them(story: list[tuple[int, float, int]]) -> None:
    refusals, now, seen = Refusals(), 0.0, list[tuple[int, float, int]]()
    for client, pause, rest_s in story:
        now += pause
        seen = [(other, at, s) for other, at, s in seen if now - at < REFUSALS_WINDOW_S and other != client]
        seen.append((client, now, rest_s))
        expected = min(s for _, _, s in seen) if len(seen) >= REFUSED_CLIENTS else 0
        assert refusals.refused(client, rest_s, now) == expected
        if expected:
            seen = []
