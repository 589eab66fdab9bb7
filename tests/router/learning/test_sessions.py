from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.learning.sessions import (
    MAX_CLIENTS,
    MAX_HOLDERS,
    MAX_NEW,
    MAX_RETURNED,
    PRIOR,
    RECENT_TOKENS,
    ClientShares,
    Sessions,
    session_key,
)


def held(sessions: Sessions, number: int, replica: str, since: float = 0.0) -> int:
    session = sessions.find(number)
    return sessions.held(session, replica, since) if session else 0


def share(sessions: Sessions, number: int, client: int = 1) -> float:
    session = sessions.find(number)
    assert session
    return sessions.share(session, client)


def test_a_session_has_a_number_of_its_own_in_each_scope() -> None:
    numbers = {
        session_key("s", "m", "t"),
        session_key("s", "m"),
        session_key("s"),
        session_key("t", "m", "s"),
        session_key("\udcff"),
    }
    assert len(numbers) == 5
    assert session_key("s", "m") == session_key("s", "m")
    assert session_key("", "m", "t") == 0


def test_the_last_prompt_of_each_holder_is_remembered() -> None:
    sessions = Sessions()
    sessions.answered(1, "a", 100, 1.0)
    sessions.answered(1, "b", 70, 2.0)
    sessions.answered(1, "a", 40, 3.0)
    assert (held(sessions, 1, "a"), held(sessions, 1, "b"), held(sessions, 1, "c"), held(sessions, 2, "a")) == (40, 70, 0, 0)
    assert (held(sessions, 1, "a", 2.5), held(sessions, 1, "b", 2.5)) == (40, 0), "older answers are not counted on"


def test_a_lost_cache_holds_nothing_of_before() -> None:
    sessions = Sessions()
    sessions.answered(1, "a", 100, 1.0)
    sessions.lost("a", 2.0, 10.0)
    assert held(sessions, 1, "a") == 0
    sessions.answered(1, "a", 50, 3.0)
    assert held(sessions, 1, "a") == 50
    for number in range(1000):  # replicas that come and go
        sessions.lost(f"pod-{number}", 3.0 + number, 10.0)
    assert held(sessions, 1, "a") == 50
    assert len(sessions._losses) <= 11


def test_sessions_by_the_million_displace_none_that_return() -> None:
    sessions = Sessions()
    for _ in range(2):
        for number in range(1, 101):
            sessions.answered(number, "a", 7, 1.0)
    for number in range(1000, 1000 + 3 * MAX_NEW):
        sessions.answered(number, "b", 1, 2.0)
    sessions.check()
    assert len(sessions) == 100 + MAX_NEW
    assert all(held(sessions, number, "a") == 7 for number in range(1, 101))
    for number in range(1000 + 2 * MAX_NEW, 1000 + 3 * MAX_NEW):
        assert held(sessions, number, "b") == 1
    for number in range(10**6, 10**6 + MAX_RETURNED):
        sessions.answered(number, "c", 1, 3.0)
        sessions.answered(number, "c", 1, 3.0)
    sessions.check()
    assert held(sessions, 1, "a") == 0, "others that return displace it, if they are enough"


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from("abcdefg"), st.integers(0, 9)), max_size=60))
def test_a_session_has_its_latest_holders(answers: list[tuple[int, str, int]]) -> None:
    """Against a plain list of all answers."""
    sessions = Sessions()
    for now, (number, replica, units) in enumerate(answers):
        sessions.answered(number, replica, units, float(now))
    sessions.check()
    for number in (1, 2, 3):
        last = {replica: units for one, replica, units in answers if one == number}
        order = list(dict.fromkeys(replica for one, replica, _ in reversed(answers) if one == number))[:MAX_HOLDERS]
        for replica in "abcdefg":
            assert held(sessions, number, replica, -1.0) == (last[replica] if replica in order else 0)


def test_the_share_is_learned_from_reports() -> None:
    sessions = Sessions()
    for number in (1, 2):
        sessions.answered(number, "a", 1, 1.0)
    assert share(sessions, 1) == PRIOR
    for _ in range(200):
        sessions.learn(1, 1, 5000.0, 5000.0)
    for _ in range(200):
        sessions.learn(2, 1, 5000.0, 0.0)
    assert share(sessions, 1) > 0.98
    assert share(sessions, 2) < 0.02
    sessions.answered(3, "a", 1, 1.0)
    assert share(sessions, 3) == pytest.approx(0.25, abs=0.25), "a new one is expected to be as the others were"


def test_newer_reports_count_more() -> None:
    sessions = Sessions()
    sessions.answered(1, "a", 1, 1.0)
    for _ in range(1000):
        sessions.learn(1, 1, RECENT_TOKENS / 100, 0.0)
    for _ in range(300):
        sessions.learn(1, 1, RECENT_TOKENS / 100, RECENT_TOKENS / 100)
    assert share(sessions, 1) > 0.9


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1)), max_size=50))
def test_a_share_is_a_share(reports: list[tuple[float, float]]) -> None:
    sessions = Sessions()
    sessions.answered(1, "a", 1, 1.0)
    for unseen, part in reports:
        sessions.learn(1, 1, unseen, unseen * part)
    sessions.check()


def test_more_holders_of_a_restored_session_displace_none() -> None:
    sessions = Sessions()
    sessions.restore(7, {"a": (1, 10.0)}, None, returned=False)
    sessions.answered(7, "b", 2, 20.0)
    sessions.restore_more(7, {"a": (9, 11.0), "c": (3, 5.0), "d": (4, 15.0), "e": (5, 12.0)})
    session = sessions.find(7)
    assert session is not None
    assert list(session.holders.items()) == [("a", (1, 10.0)), ("e", (5, 12.0)), ("d", (4, 15.0)), ("b", (2, 20.0))]
    assert len(session.holders) == MAX_HOLDERS
    sessions.restore_more(8, {"a": (1, 10.0)})
    assert sessions.find(8) is None
    sessions.check()


# -- clients


def test_no_client_changes_what_is_expected_of_others() -> None:
    """Of one client, of two, and of a liar beside others."""
    shares = ClientShares()
    for _ in range(1000):
        shares.learn(1, 50_000.0, 0.0)
        shares.learn(2, 50_000.0, 0.0)
    assert (shares.value(1), shares.value(2)) == pytest.approx((0, 0), abs=0.05)
    assert shares.value(3) == PRIOR
    for client in (3, 4, 5, 6):
        shares.learn(client, 1_000_000.0, 900_000.0)
    others = [shares.value(client) for client in (3, 4, 5, 6)]
    new = shares.value(99)
    assert new > 0.8, "a new client is expected to be as most of the others"
    for _ in range(1000):
        shares.learn(7, 1_000_000.0, 0.0)
    assert shares.value(99) == pytest.approx(new, abs=0.01)
    assert [shares.value(client) for client in (3, 4, 5, 6)] == pytest.approx(others, abs=0.01)
    shares.check()


def test_clients_are_bounded_and_the_least_recently_reported_one_is_forgotten() -> None:
    shares = ClientShares()
    shares.learn(1, 1_000_000.0, 1_000_000.0)
    for client in range(2, 3 * MAX_CLIENTS):
        shares.learn(client, 1000.0, 0.0)
        shares.learn(1, 1000.0, 1000.0)
        shares.check()
    assert len(shares.sums) == MAX_CLIENTS
    assert shares.value(1) > 0.9
    assert shares.value(2) == shares.median, "it is forgotten"


def test_shares_are_restored_where_none_are_known() -> None:
    shares, copy = ClientShares(), ClientShares()
    for client in range(5):
        shares.learn(client, 100_000.0, 20_000.0 * client)
    copy.restore(shares.sums)
    assert [copy.value(client) for client in range(6)] == [shares.value(client) for client in range(6)]
    copy.restore([(9, 100_000.0, 0.0)])
    assert copy.sums == shares.sums
