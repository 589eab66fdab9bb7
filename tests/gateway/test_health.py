from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from gateway.health import REST_MOST_S, Attempt, Breaker, BreakerRules, RetryBudget, jitter, share
from tests.machines import STEPS, CountedMachine, steps_of


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


# -- slow start


@pytest.mark.parametrize(("now", "part"), [(90.0, 0.1), (100.0, 0.1), (105.0, 0.55), (110.0, 1.0), (1e9, 1.0)])
def test_a_replica_that_came_up_gets_its_share_by_and_by(now: float, part: float) -> None:
    assert share(100.0, now, 10.0) == pytest.approx(part)


@given(st.floats(-5, 50), st.floats(0, 5), st.sampled_from([0.0, 1e-9, 3.0, 30.0]))
def test_the_share_only_grows(now: float, later: float, window_s: float) -> None:
    assert 0.1 <= share(0.0, now, window_s) <= share(0.0, now + later, window_s) <= 1.0
    assert share(0.0, window_s, window_s) == 1.0


# -- the breaker


@dataclass(eq=False)
class Sent:
    """probe: it took the slot. era: the model's when it was sent; None if it was sent though it was not allowed."""

    attempt: Attempt
    era: int | None
    probe: bool


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
        self.opened = self.good = self.era = 0
        self.outcomes: list[bool] = []  # since it closed; True: failed
        self.sent: list[Sent] = []
        self.judged: list[Attempt] = []

    @property
    def probing(self) -> bool:
        return any(sent.probe and sent.era == self.era for sent in self.sent)

    @rule()
    def begin(self) -> None:
        allowed = self.now >= self.retry_at and not self.probing
        heard = not self.opened or allowed
        self.sent.append(Sent(self.breaker.begin(self.now), self.era if heard else None, bool(self.opened) and allowed))

    def judge(self, data: st.DataObject) -> tuple[Attempt, bool]:
        """One that is under way, and whether its verdict counts."""
        sent = data.draw(st.sampled_from(self.sent))
        self.sent.remove(sent)
        self.judged.append(sent.attempt)
        return sent.attempt, sent.era == self.era

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def success(self, data: st.DataObject) -> None:
        attempt, counts = self.judge(data)
        attempt.success()
        if not counts:
            return
        if not self.opened:
            self.outcomes.append(False)
            return
        self.good += 1
        if self.good == self.rules.needed:
            self.opened, self.outcomes = 0, []
            self.era += 1

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def failure(self, data: st.DataObject) -> None:
        attempt, counts = self.judge(data)
        attempt.failure(self.now)
        if not counts:
            return
        self.outcomes.append(True)
        in_a_row = self.outcomes[-self.rules.failures :] == [True] * self.rules.failures
        recent = self.outcomes[-self.rules.window :]
        too_many = len(recent) >= self.rules.least and sum(recent) / len(recent) > self.rules.failed_share
        if self.opened or in_a_row or too_many:
            back_off_s = min(30.0, 2.0**self.opened) * (0.75 + 0.25 * self.chance)
            self.retry_at = max(self.retry_at, self.now + back_off_s)
            self.opened, self.good = self.opened + 1, 0
            self.era += 1

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abandoned(self, data: st.DataObject) -> None:
        self.judge(data)[0].abandoned()

    @precondition(lambda self: self.judged)
    @rule(data=st.data())
    def judge_again(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.judged))
        attempt.abandoned()
        attempt.failure(self.now)
        attempt.success()

    @rule(seconds=st.sampled_from([0.1, 1.0, 8.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([-1.0, 0.5, 1e6]))
    def rest(self, seconds: float) -> None:
        self.breaker.rest(self.now + seconds, self.now)
        self.retry_at = max(self.retry_at, self.now + min(seconds, REST_MOST_S))

    @invariant()
    def it_is_the_model(self) -> None:
        if not self.opened:
            self.good = 0
        self.breaker.check()
        state = "closed" if not self.opened else "open" if self.now < self.retry_at else "half_open"
        assert self.breaker.state(self.now) == state
        assert self.breaker.allows(self.now) is (self.now >= self.retry_at and not self.probing)
        assert self.breaker.retry_at == pytest.approx(self.retry_at) or self.retry_at == 0.0
        assert sum(sent.probe and sent.era == self.era for sent in self.sent) <= 1

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


def test_a_breaker_is_what_its_model_says() -> None:
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
    assert (repr(probe), repr(breaker)) == ("<Attempt under way>", "<Breaker opened 1 times in a row, until 11.000, probing>")
    probe.success()
    assert (breaker.state(11.0), breaker.allows(11.0)) == ("closed", True)
    assert (repr(probe), repr(breaker)) == ("<Attempt judged>", "<Breaker closed, 0 of 0 failed>")


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
    assert breaker.state(1.0) == "half_open", "what was sent before tells nothing of the replica now"


def test_a_probe_whose_client_left_makes_room_for_another() -> None:
    breaker = Breaker(Always(1.0))
    opened(breaker, 0.0)
    breaker.begin(1.0).abandoned()
    assert (breaker.state(1.0), breaker.allows(1.0)) == ("half_open", True)


def test_a_replica_that_asks_for_rest_gets_it_and_has_not_failed() -> None:
    breaker = Breaker(Always(1.0))
    breaker.rest(5.0, now=0.0)
    breaker.rest(3.0, now=0.0)
    assert (breaker.state(4.0), breaker.allows(4.0), breaker.allows(5.0)) == ("closed", False, True)
    breaker.rest(1e9, now=5.0)
    assert breaker.retry_at == 65.0
