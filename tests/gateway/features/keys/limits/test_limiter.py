"""Limits of keys: what is reserved and spent adds up, whatever comes in whatever order, and time that jumps."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.features.keys.limits.account import MAX_PROCESSES, RETAINED_DAYS, KeyLimits, merged
from gateway.features.keys.limits.calendar import Calendar, day_number, day_of_text, day_text
from gateway.features.keys.limits.limiter import Limiter, Moment, Reservation
from gateway.features.keys.limits.rate import Rate

DAY = day_number(2026, 11, 27)
DEBT_S = 600.0  # ten minutes, as docs/keys.md has it


def at(now: float = 0.0, day: int = DAY) -> Moment:
    return Moment(now, day, 100.0, 1000.0)


def test_a_rate_gives_a_minutes_worth_at_once_and_then_as_it_comes() -> None:
    rate = Rate(60)
    assert rate.wait(60, 0) == 0
    rate.take(60, 0)
    assert rate.wait(1, 0) == pytest.approx(1)
    assert rate.wait(1, 1) == 0
    assert rate.available(30) == 30
    assert rate.wait(1000, 59) == pytest.approx(1)  # more than there ever is: when nothing is owed
    assert rate.wait(1000, 60) == 0


def test_what_was_taken_too_much_comes_back_and_debts_end() -> None:
    rate = Rate(60)
    rate.take(100, 0)
    rate.take(-70, 0)
    assert rate.available(0) == 30
    rate.take(10**18, 0)
    assert rate.wait(1, DEBT_S) == pytest.approx(1)
    assert rate.wait(1, DEBT_S + 1) == pytest.approx(0)
    assert rate.wait(1, -1e9) > 0  # a clock that goes back


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30)), max_size=60), st.integers(1, 100))
def test_no_time_takes_more_than_the_rate_and_one_burst(steps: list[tuple[float, int]], per_minute: int) -> None:
    rate, now, taken = Rate(per_minute), 0.0, list[tuple[float, int]]()
    for pause, amount in steps:
        now += pause
        if amount <= per_minute and not rate.wait(amount, now):
            rate.take(amount, now)
            taken.append((now, amount))
    for begin in range(len(taken)):
        total = sum(amount for _, amount in taken[begin:])
        assert total <= per_minute * (1 + (taken[-1][0] - taken[begin][0]) / 60) + 1e-6


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_what_is_reserved_and_spent_is_conserved(seed: int, steps: int) -> None:
    """Against a list of what is open and a sum of what was settled."""
    chance = random.Random(seed)
    limiter, limits = Limiter(), KeyLimits(requests=1000, tokens=10**6, day=10_000, month=15_000)
    open_, spent, requests = list[Reservation](), dict[int, int](), 0
    for step in range(steps):
        moment = at(step, DAY + chance.choice([0, 0, 0, 1, -1]))
        kind = chance.random()
        try:
            if kind < 0.4:
                open_.append(limiter.enter("k", limits, moment))
                requests += 1
            elif kind < 0.7 and open_:
                chance.choice(open_).reserve(chance.randrange(1000), chance.randrange(3000), moment)
            elif open_:
                one = open_.pop(chance.randrange(len(open_)))
                money = chance.randrange(3000)
                for _ in range(2):  # the second time does nothing
                    one.settle(chance.randrange(1000), 10, money, moment)
                spent[moment.day] = spent.get(moment.day, 0) + money
        except GatewayError as error:
            assert error.status == 429  # noqa: PT017
            assert error.retry_after_s is not None  # noqa: PT017
            assert 0 < error.retry_after_s <= 86_400  # noqa: PT017
        account = limiter.account("k")
        if account:
            assert account.own.reserved == sum(each.money for each in open_)
            assert account.own.tokens - sum(each.tokens for each in open_) >= 0
            assert {day: amount for day, amount in account.own.days.items() if amount} == {
                day: amount for day, amount in spent.items() if amount
            }
            assert account.own.requests == requests
            assert account.open == len(open_)
    for one in open_:
        one.settle(0, 0, 0, at())
    limiter.check()


def test_a_budget_is_not_exceeded_but_by_one_request() -> None:
    limiter, limits, admitted = Limiter(), KeyLimits(day=1000), list[Reservation]()
    for _ in range(1000):
        one = limiter.enter("k", limits, at())
        try:
            one.reserve(1, 150, at())
            admitted.append(one)
        except GatewayError:
            one.settle(0, 0, 0, at())
    assert len(admitted) == 6
    for one in admitted:
        one.settle(1, 1, 150, at())
    last = limiter.enter("k", limits, at())
    last.reserve(1, 150, at())  # 100 are left, and nobody else runs
    last.settle(1, 1, 150, at())
    with pytest.raises(GatewayError, match="is spent") as spent:
        limiter.enter("k", limits, at())
    assert (spent.value.code, spent.value.retry_after_s) == ("insufficient_quota", 100)
    limiter.check()


def test_a_budget_can_be_reserved_to_its_last_picodollar() -> None:
    limiter, limits = Limiter(), KeyLimits(day=1000)
    first = limiter.enter("k", limits, at())
    first.reserve(1, 400, at())
    second = limiter.enter("k", limits, at())
    with pytest.raises(GatewayError, match="is reserved"):
        second.reserve(1, 601, at())
    second.reserve(1, 600, at())
    account = limiter.account("k")
    assert account is not None
    assert account.reserved == 1000


def test_an_answer_is_expected_to_be_as_long_as_the_longest_recent_one() -> None:
    """Of 1,024 tokens at least. Answers that are shorter let it be forgotten, little by little."""
    limiter, limits = Limiter(), KeyLimits(day=10**9)

    def expected(after: int) -> int:
        limiter.enter("k", limits, at()).settle(1, after, 1, at())
        return limiter.enter("k", limits, at()).output()

    assert limiter.enter("k", limits, at()).output() == 1024
    assert expected(after=8000) == 8000
    later = [expected(after=100) for _ in range(50)]
    assert later[0] > 4000, "one short answer says little"
    assert later == sorted(later, reverse=True)
    assert later[-1] == 1024
    assert [expected(after=2000), expected(after=3000)] == [2000, 3000]


def test_a_month_is_the_sum_of_its_days_and_a_clock_may_jump() -> None:
    limiter, limits = Limiter(), KeyLimits(month=1000, day=600)
    first, last, after = day_number(2026, 11, 1), day_number(2026, 11, 30), day_number(2026, 12, 1)
    for day in (first, last):
        limiter.enter("k", limits, at(0, day)).settle(0, 0, 500, at(0, day))
    with pytest.raises(GatewayError, match="this month"):
        limiter.enter("k", limits, at(0, day_number(2026, 11, 15)))
    limiter.enter("k", limits, at(0, after)).settle(0, 0, 0, at(0, after))
    with pytest.raises(GatewayError, match="this month"):  # and back
        limiter.enter("k", limits, at(0, first))


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_several_processes_do_not_admit_more_than_there_is(seed: int, number: int) -> None:
    """Messages arrive within one exchange; each process may admit one request while it knows of no other."""
    chance = random.Random(seed)
    limiters, open_ = [Limiter(number) for _ in range(number)], list[tuple[Reservation, int]]()
    for _ in range(20):
        for _ in range(chance.randrange(30)):
            _try(chance.choice(limiters), chance.randrange(1, 400), open_)
        for one, money in [each for each in open_ if chance.random() < 0.5]:
            one.settle(0, 0, money, at())
        assert sum(money for _, money in open_) <= 10_000 + number * 400
        sent = [limiter.changes() for limiter in limiters]
        for which, other in itertools.permutations(range(number), 2):
            for _ in range(chance.randrange(1, 3)):  # some come twice
                limiters[which].merge(str(other), sent[other], 0.0)


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_several_gateways_exceed_a_budget_by_what_they_have_not_told_each_other(seed: int, number: int) -> None:
    """A database tells them what was spent, but not what is reserved. Each spends the rest that it knows, and one request."""
    chance, budget, most = random.Random(seed), 10_000, 400
    gateways, open_ = [Limiter() for _ in range(number)], [list[tuple[Reservation, int]]() for _ in range(number)]
    spent, told = [0] * number, [0] * number
    for _ in range(20):
        for _ in range(chance.randrange(60)):
            which, money = chance.randrange(number), chance.randrange(1, most)
            alone = not any(one.open for one, _ in open_[which])
            known = sum(told) - told[which] + spent[which] + sum(price for one, price in open_[which] if one.open)
            before = len(open_[which])
            _try(gateways[which], money, open_[which])
            if len(open_[which]) > before:
                assert known < budget if alone else known + money <= budget
            else:
                assert known >= budget or not alone
        for which, running in enumerate(open_):
            for one, money in running:
                if one.open and chance.random() < 0.5:
                    one.settle(0, 0, money, at())
                    spent[which] += money
        if chance.random() < 0.5:
            sent = [gateway.unwritten(DAY) for gateway in gateways]
            told = list(spent)
            for which, other in itertools.permutations(range(number), 2):
                gateways[which].merge(str(other), sent[other], 0.0, first=True)
                gateways[which].release_process(str(other))  # a database has no reservations
    assert sum(money for running in open_ for _, money in running) <= number * (budget + most)


def _try(limiter: Limiter, money: int, open_: list[tuple[Reservation, int]]) -> None:
    """One request of this price."""
    try:
        one = limiter.enter("k", KeyLimits(day=10_000), at())
    except GatewayError:
        return
    try:
        one.reserve(0, money, at())
        open_.append((one, money))
    except GatewayError:
        one.settle(0, 0, 0, at())


def test_a_process_that_has_ended_has_nothing_reserved() -> None:
    limiter = Limiter(2)
    limiter.merge("other", [("k", 5, 100, 700, ((DAY, 200),))], 0.0)
    account = limiter.account("k")
    assert account is not None
    assert (account.reserved, account.spent(DAY)) == (700, 200)
    limiter.release_process("other")
    assert (account.reserved, account.spent(DAY)) == (0, 200)


def test_accounts_are_bounded() -> None:
    limiter, limits = Limiter(max_accounts=100), KeyLimits(requests=1)
    kept = limiter.enter("kept", limits, at())
    for number in range(110):
        limiter.enter(str(number), limits, at()).settle(0, 0, 0, at())
    assert len(limiter) <= 101
    assert limiter.account("kept") is not None
    kept.settle(0, 0, 0, at())


def test_days() -> None:
    calendar = Calendar()
    moment = calendar.moment(5.0, 1_764_244_800.0)  # 2025-11-27 12:00
    assert (day_text(moment.day), moment.to_day_s, moment.to_month_s) == ("2025-11-27", 43_200, 43_200 + 3 * 86_400)
    assert day_of_text("2025-11-27") == moment.day
    assert day_number(2025, 12, 1) // 31 == day_number(2025, 12, 31) // 31 == day_number(2025, 11, 30) // 31 + 1
    midnight = calendar.moment(6.0, 1_764_244_800.0 + 43_200)
    assert (day_text(midnight.day), midnight.to_day_s, midnight.to_month_s) == ("2025-11-28", 86_400, 3 * 86_400)
    for wall in (-1e18, 1e18, 0.0):
        assert 0 <= calendar.moment(0.0, wall).to_day_s <= 86_400


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("spend"), st.integers(0, 200), st.integers(0, 5)),
            st.tuples(
                st.sampled_from(["a", "b", "c"]),
                st.lists(st.tuples(st.integers(0, 200), st.integers(0, 5)), max_size=80),
                st.integers(-1, 3),
            ),
            st.tuples(st.just("ended"), st.sampled_from(["a", "b", "c"]), st.just(0)),
        ),
        max_size=30,
    )
)
def test_sums_of_days_and_months_are_those_of_the_processes(steps: list[tuple[str, Any, int]]) -> None:
    """Against dictionaries of days, of which each process keeps the last ones."""
    limiter, limits = Limiter(), KeyLimits(day=10**9)
    days: dict[str, dict[int, int]] = {"own": {}}
    reserved: dict[str, int] = {}
    for name, what, amount in steps:
        if name == "spend":
            limiter.enter("k", limits, Moment(0.0, what, 1.0, 1.0)).settle(0, 0, amount, Moment(0.0, what, 1.0, 1.0))
            spent = days["own"]
            spent[what] = spent.get(what, 0) + amount
        elif name == "ended":
            limiter.release_process(what)
            reserved[what] = 0
            continue
        else:
            limiter.merge(name, [("k", 0, 0, amount, tuple(what))], 0.0)
            spent, reserved[name] = days.setdefault(name, {}), max(0, amount)
            for day, found in what:
                spent[day] = max(spent.get(day, 0), found)
        for oldest in sorted(spent)[:-RETAINED_DAYS]:
            del spent[oldest]
        account = limiter.account("k")
        assert account is not None
        account.check()
        assert account.reserved == sum(reserved.values())
        for day in range(0, 201, 20):
            assert account.spent(day) == sum(each.get(day, 0) for each in days.values())
            month = [found for each in days.values() for other, found in each.items() if other // 31 == day // 31]
            assert account.spent_in_month(day) == sum(month)


def test_asking_takes_nothing() -> None:
    limiter, limits = Limiter(), KeyLimits(requests=2, tokens=1000, day=100)
    for _ in range(50):
        limiter.require("k", limits, at())
    reservations = [limiter.enter("k", limits, at()) for _ in range(2)]
    with pytest.raises(GatewayError) as refused:
        limiter.require("k", limits, at())
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    for reservation in reservations:
        reservation.settle(10, 1, 60, at())
    with pytest.raises(GatewayError) as spent:
        limiter.require("k", limits, at(now=120))
    assert spent.value.code == "insufficient_quota"
    limiter.check()


def test_more_lives_of_workers_than_have_sums_of_their_own_are_all_counted() -> None:
    """Those that were silent for longest become one sum; the news of those that serve now stays apart."""
    limiter, limits, day = Limiter(), KeyLimits(day=10**6), DAY
    lives = MAX_PROCESSES + 500
    for life in range(lives):
        limiter.merge("serves", [("k", 0, 0, 0, ((day, life),))], 0.0)
        limiter.merge(f"life {life}", [("k", 0, 0, 5, ((day, 1),))], 0.0)
    account = limiter.account("k")
    assert account is not None
    account.check()
    assert account.spent(day) == lives + lives - 1
    assert account.reserved == 5 * (MAX_PROCESSES - 1), "of those that are gone nothing is reserved"
    assert len(account.by_process) == MAX_PROCESSES
    limiter.merge("serves", [("k", 0, 0, 0, ((day, 10**6),))], 0.0)
    with pytest.raises(GatewayError):
        limiter.enter("k", limits, at(day=day))


def test_others_are_forgotten_to_be_read_anew() -> None:
    limiter = Limiter()
    for name in ("a", "b"):
        limiter.merge(name, [("k", 0, 0, 3, ((DAY, 7), (DAY - 31, 2)))], 0.0)
    limiter.forget_spending_of_others({"b"})
    account = limiter.account("k")
    assert account is not None
    account.check()
    assert (account.spent(DAY), account.reserved) == (7, 6)
    limiter.merge("a", [("k", 0, 0, 0, ((DAY, 7),))], 0.0, first=True)
    assert account.spent(DAY) == 14
    account.check()


def test_what_was_refused_is_no_request() -> None:
    limiter, limits = Limiter(), KeyLimits(requests=2, tokens=100)
    for _ in range(5):
        refused = limiter.enter("k", limits, at())
        refused.settle(0, 0, 0, at(), served=False)
    for _ in range(2):
        limiter.enter("k", limits, at()).settle(1, 1, 0, at())
    with pytest.raises(GatewayError) as over:
        limiter.enter("k", limits, at())
    assert "2 requests" in str(over.value)
    assert limiter.totals() == [("k", 2, 2, 0, ((DAY, 0),))]


def test_a_debt_outlives_other_limits() -> None:
    """A new file of keys makes new limits, though they are the same."""
    limiter = Limiter()
    limiter.enter("k", KeyLimits(tokens=1000), at()).settle(1_000_000, 0, 0, at())
    with pytest.raises(GatewayError) as over:
        limiter.enter("k", KeyLimits(tokens=1000), at(now=1))
    assert over.value.retry_after_s == pytest.approx(DEBT_S, abs=2)


def test_only_days_that_have_changed_are_sent_and_written() -> None:
    limiter, limits = Limiter(processes=2), KeyLimits(day=10**9)
    for day in range(DAY, DAY + 20):
        limiter.enter("k", limits, at(day=day)).settle(0, 0, 7, at(day=day))
    today = DAY + 19
    assert len(limiter.changes()[0][4]) == len(limiter.unwritten(today)[0][4]) == 20
    limiter.enter("k", limits, at(day=today)).settle(0, 0, 1, at(day=today))
    assert limiter.changes() == [("k", 21, 0, 0, ((today, 8),))]
    assert limiter.unwritten(DAY) == [("k", 21, 0, 0, tuple({(today, 8), (DAY, 7)}))], "and today, as a clock that jumps has it"
    assert limiter.changes() == limiter.unwritten(today) == []


def test_totals_that_were_not_written_keep_their_days() -> None:
    before, after = ("k", 1, 2, 3, ((1, 5), (2, 6))), ("k", 4, 5, 6, ((2, 7), (3, 8)))
    assert merged(before, after) == ("k", 4, 5, 6, ((1, 5), (2, 7), (3, 8)))


def test_what_nobody_takes_is_not_noted() -> None:
    """Else accounts that are forgotten stay in memory."""
    alone, noted = Limiter(persistent=False), Limiter(processes=2)
    for limiter in (alone, noted):
        limiter.enter("k", KeyLimits(day=5), at()).settle(1, 1, 1, at())
    assert alone.changes() == alone.unwritten(DAY) == []
    assert len(noted.changes()) == len(noted.unwritten(DAY)) == 1


def test_what_was_reserved_and_not_used_comes_back() -> None:
    limiter, limits = Limiter(), KeyLimits(tokens=1000, day=1000)
    first = limiter.enter("k", limits, at())
    first.reserve(900, 900, at())
    with pytest.raises(GatewayError):
        limiter.enter("k", limits, at()).reserve(200, 1, at())
    first.reserve(300, 300, at())  # another attempt, in the place of the first one
    limiter.enter("k", limits, at()).reserve(600, 600, at())
    first.settle(10, 1, 10, at())
    account = limiter.account("k")
    assert account is not None
    assert account.tokens is not None
    assert (account.tokens.available(0.0), account.reserved, account.spent(DAY)) == (390, 600, 10)


def test_a_forgotten_account_comes_back_with_what_it_had() -> None:
    """What is still to be written is in memory; what was written is to be read, once."""
    limiter, limits = Limiter(max_accounts=1), KeyLimits(day=1000)
    limiter.enter("a", limits, at()).settle(0, 0, 400, at())
    limiter.enter("b", limits, at()).settle(0, 0, 1, at())
    assert limiter.account("a") is None
    limiter.enter("a", limits, at()).settle(0, 0, 100, at())
    assert limiter.unread(9) == []
    assert {total[0]: total[4] for total in limiter.unwritten(DAY)} == {"a": ((DAY, 500),), "b": ((DAY, 1),)}

    limiter.enter("b", limits, at()).settle(0, 0, 2, at())
    limiter.merge("other", [("c", 0, 0, 0, ((DAY, 10),))], 0.0)
    assert limiter.account("c") is None, "nobody's account is forgotten for it"
    assert limiter.unread(9) == ["b"]
    for _ in range(2):
        limiter.restore("b", [(DAY, 1)])
    assert limiter.unwritten(DAY) == [("b", 1, 0, 0, ((DAY, 3),))]
    assert limiter.unread(9) == []
    limiter.check()


def test_what_comes_back_of_a_forgotten_account_is_news_for_other_processes() -> None:
    """Though there was an exchange since the account was used, as the database takes longer to answer."""
    limiter, limits = Limiter(2, max_accounts=1), KeyLimits(day=1000)
    for name in ("a", "b"):
        limiter.enter(name, limits, at()).settle(0, 0, 400, at())
    limiter.changes()
    limiter.unwritten(DAY)
    limiter.enter("a", limits, at()).settle(0, 0, 100, at())
    assert limiter.changes() == [("a", 1, 0, 0, ((DAY, 100),))]
    assert limiter.unread(9) == ["a"]
    limiter.restore("a", [(DAY, 400)])
    assert limiter.changes() == limiter.unwritten(DAY) == [("a", 1, 0, 0, ((DAY, 500),))]


def test_nothing_is_to_be_read_where_nothing_is_written() -> None:
    limiter, limits = Limiter(persistent=False, max_accounts=1), KeyLimits(day=1000)
    for name in ("a", "b", "a"):
        limiter.enter(name, limits, at()).settle(0, 0, 400, at())
    limiter.merge("other", [("c", 0, 0, 0, ((DAY, 10),))], 0.0)
    assert limiter.unread(9) == []
    assert limiter.account("c") is not None


def test_what_others_did_before_they_were_known_is_no_debt() -> None:
    """A worker that starts knows what was spent, and not what was used in the last minute."""
    limiter, limits = Limiter(2), KeyLimits(requests=10, tokens=100, day=1000)
    limiter.enter("k", limits, at()).settle(0, 0, 0, at())
    account = limiter.account("k")
    assert account is not None
    assert account.requests is not None
    assert account.tokens is not None
    limiter.merge("other", [("k", 500, 5000, 0, ((DAY, 7),))], 0.0, first=True)
    assert (account.requests.available(0.0), account.tokens.available(0.0), account.spent(DAY)) == (9, 100, 7)
    limiter.merge("other", [("k", 502, 5030, 0, ((DAY, 8),))], 0.0, first=True)
    assert (account.requests.available(0.0), account.tokens.available(0.0), account.spent(DAY)) == (7, 70, 8)


def test_a_database_is_behind_what_workers_say_themselves() -> None:
    limiter, limits = Limiter(2), KeyLimits(requests=10, day=1000)
    limiter.enter("k", limits, at()).settle(0, 0, 0, at())
    limiter.merge("worker", [("k", 5, 0, 300, ((DAY, 70),))], 0.0)
    limiter.merge("worker", [("k", 1, 0, 0, ((DAY, 40), (DAY - 1, 9)))], 0.0, money_only=True)
    account = limiter.account("k")
    assert account is not None
    assert account.requests is not None
    assert (account.reserved, account.spent(DAY), account.spent_in_month(DAY)) == (300, 70, 79)
    assert account.requests.available(0.0) == 4


def test_sums_fit_into_a_database() -> None:
    limiter = Limiter()
    for _ in range(3):
        limiter.enter("k", KeyLimits(requests=10), at()).settle(0, 0, 8 * 10**18, at())
    ((_, _, _, _, days),) = limiter.unwritten(DAY)
    assert days == ((DAY, 9 * 10**18),)


def test_nobody_is_told_to_wait_for_more_than_a_day() -> None:
    limiter, limits = Limiter(), KeyLimits(month=10)
    limiter.enter("k", limits, at()).settle(0, 0, 10, at())
    with pytest.raises(GatewayError) as over:
        limiter.enter("k", limits, Moment(0.0, DAY, 100.0, 20 * 86_400.0))
    assert over.value.retry_after_s == 86_400


def test_days_are_bounded() -> None:
    """Of this process, of another one, and of those that are gone, whatever their clocks say."""
    limiter, days = Limiter(), range(DAY, DAY + 3 * RETAINED_DAYS)
    for day in days:
        limiter.enter("k", KeyLimits(day=10**9), at(day=day)).settle(0, 0, 1, at(day=day))
        limiter.merge("other", [("k", 0, 0, 0, ((day, 1),))], 0.0)
    account = limiter.account("k")
    assert account is not None
    kept = list(days)[-RETAINED_DAYS:]
    assert list(account.own.days) == list(account.others_total.days) == kept
    for number in range(MAX_PROCESSES + len(days)):
        limiter.merge(f"life {number}", [("k", 0, 0, 0, ((DAY + min(number, len(days)), 1),))], 0.0)
    assert len(account.folded.days) == RETAINED_DAYS
    account.check()


def test_what_others_did_before_an_account_came_back_is_no_debt() -> None:
    limiter, limits = Limiter(2, max_accounts=1), KeyLimits(requests=10)
    for name in ("k", "other key"):
        limiter.enter(name, limits, at()).settle(0, 0, 0, at())
        limiter.changes()
        limiter.unwritten(DAY)
    limiter.enter("k", limits, at()).settle(0, 0, 0, at())
    for requests in (500, 501):
        limiter.merge("worker", [("k", requests, 0, 0, ())], 0.0)
    account = limiter.account("k")
    assert account is not None
    assert account.requests is not None
    assert account.requests.available(0.0) == 8


def test_what_nobody_takes_is_bounded() -> None:
    """A database, or a hub, that is away while an issuer lets in ever new tenants."""
    limiter, limits = Limiter(2, max_accounts=10), KeyLimits(day=1000)
    for number in range(1000):
        limiter.enter(str(number), limits, at()).settle(0, 0, 1, at())
    assert len(limiter) == 10
    assert len(limiter.changes()) == 20
    assert [total[0] for total in limiter.unwritten(DAY)] == [str(number) for number in range(980, 1000)]
    assert limiter.dropped == 980
    for _ in range(3):
        for number in range(10):
            limiter.enter(str(number), limits, at()).settle(0, 0, 1, at())
    assert limiter.dropped == 980


def test_a_credit_raises_the_budget_of_its_day_and_month() -> None:
    limits = KeyLimits(day=100, month=150, credited=[(DAY, 60), (DAY, 5), (DAY + 1, 7), (DAY - 31, 1000)])
    assert [limits.of_day(day) for day in (DAY, DAY + 1, DAY + 2)] == [165, 107, 100]
    assert limits.of_month(DAY) == 150 + 72
    limiter = Limiter()
    limiter.enter("k", limits, at()).settle(1, 1, 164, at())
    limiter.enter("k", limits, at()).settle(1, 1, 1, at())
    with pytest.raises(GatewayError, match="day is spent"):
        limiter.require("k", limits, at())
    limiter.require("k", limits, at(day=DAY + 2))
