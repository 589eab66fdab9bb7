"""What failures count that no other replica could be compared with, against the list of all that has happened."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.request.lone_failures import MAX_CLIENTS, WINDOW_S, LoneFailures

EVENTS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from("abcd"), st.sampled_from([0.0, 1.0, 20.0, 61.0]), st.integers(-1, 3)),
    max_size=60,
)


@given(EVENTS)
def test_a_client_goes_on_to_another_replica_only_when_the_last_one_has_answered_it_or_was_left_alone(
    events: list[tuple[int, str, float, int]],
) -> None:
    """An event: the client, the replica, the seconds that pass before; -1: it fails, else: it answers the request of that
    number of events before.
    """
    lone, now = LoneFailures(), 0.0
    times: list[float] = []
    failures: list[tuple[int, str, float]] = []
    answered: list[tuple[int, str, float]] = []
    counted: dict[int, str] = {}  # by client: the replica whose failure counted last
    for client, replica, pause, kind in events:
        now += pause
        times.append(now)
        if kind >= 0:
            begun = times[max(0, len(times) - 1 - kind)]
            lone.answered(client, replica, begun)
            answered.append((client, replica, begun))
        else:
            before = counted.get(client)
            if lone.failed(client, replica, now):
                if before not in (None, replica):
                    last = max(at for who, where, at in failures if (who, where) == (client, before))
                    good = any(begun > last for who, where, begun in answered if (who, where) == (client, before))
                    assert good or now - last >= WINDOW_S
                counted[client] = replica
            failures.append((client, replica, now))
        lone.check()


@given(EVENTS)
def test_a_replica_that_fails_alone_is_always_blamed(events: list[tuple[int, str, float, int]]) -> None:
    """All clients have one address, as behind a proxy; a fails whatever it is asked, the others answer, or fail once before."""
    lone, now = LoneFailures(), 0.0
    for _, replica, pause, kind in events:
        now += 0.001 + pause
        if replica == "a":
            assert lone.failed(1, "a", now)
            continue
        if kind == -1:
            lone.failed(1, replica, now)
            now += 0.001
        lone.answered(1, replica, now)


def test_what_fails_everywhere_counts_once() -> None:
    lone = LoneFailures()
    counts = [lone.failed(7, f"replica {number % 5}", number * 0.1) for number in range(1000)]
    assert counts == [True] + [False] * 999
    assert lone.failed(7, "another", 200.0), "it was silent for longer than a minute"
    assert lone.failed(8, "replica 1", 99.0), "another client"


def test_an_answer_that_was_on_its_way_before_the_failure_takes_nothing_back() -> None:
    lone = LoneFailures()
    assert lone.failed(1, "a", 10.0)
    lone.answered(1, "a", 9.0)
    lone.answered(1, "b", 11.0)
    lone.answered(2, "a", 11.0)
    assert not lone.failed(1, "b", 12.0)
    lone.answered(1, "a", 11.0)
    assert lone.failed(1, "b", 13.0)


def test_the_replica_whose_failures_counted_is_not_forgotten_for_others() -> None:
    lone = LoneFailures()
    assert [lone.failed(1, replica, at) for at, replica in enumerate("abc")] == [True, False, False]
    lone.answered(1, "c", 3.0)
    lone.answered(1, "b", 3.0)
    assert not lone.failed(1, "b", 4.0)


def test_a_flood_of_clients_is_bounded_and_those_who_fail_are_remembered() -> None:
    lone, chance = LoneFailures(), Random(1)
    for number in range(20_000):
        now = number * 0.001
        if number % 500 == 0:
            assert lone.failed(-1, f"replica {number % 3}", now) is (number == 0)
        lone.failed(chance.randrange(1 << 60), f"replica {chance.randrange(1000)}", now)
        if number % 1000 == 0:
            lone.check()
    assert repr(lone) == f"<LoneFailures of {MAX_CLIENTS} clients>"
    assert lone.until == now + WINDOW_S
