from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.learning.adapters import LOAD_S, MAX_CLIENTS, SLOTS, Adapters, LoadedAdapters, LoadTime

INITIAL, LEAST, MOST = LOAD_S
steps = st.lists(st.tuples(st.sampled_from(["open", "use", "end"]), st.sampled_from("abcde")), max_size=60)


@given(steps, st.integers(1, 4))
def test_a_replica_holds_the_last_used_and_those_of_open_requests(steps: list[tuple[str, str]], slots: int) -> None:
    loaded, used, opened = LoadedAdapters(slots), OrderedDict[str, None](), list[str]()
    for what, name in steps:
        getattr(loaded, what)(name)
        if what == "open":
            opened.append(name)
        elif what == "end" and name in opened:
            opened.remove(name)
        elif what == "use":
            used[name] = None
            used.move_to_end(name)
        loaded.check()
        held = {*list(used)[-slots:], *opened}
        assert {each for each in "abcde" if loaded.holds(each)} == held, f"after {what} {name}: {loaded!r}"


def test_a_request_that_shows_no_token_takes_no_place() -> None:
    adapters = Adapters()
    adapters.add("r", 1)
    adapters.use("r", "a")
    assert adapters.open("r", "b")
    assert not adapters.open("r", "b"), "the first one loads it"
    assert (adapters.load_s("r", "a"), adapters.load_s("r", "b")) == (0.0, 0.0)
    adapters.end("r", "b", used=False)
    adapters.end("r", "b", used=False)
    assert (adapters.load_s("r", "a"), adapters.load_s("r", "b")) == (0.0, INITIAL)


def test_a_restart_and_fewer_places_end_the_belief() -> None:
    adapters = Adapters()
    adapters.add("r", None)
    for number in range(SLOTS):
        adapters.use("r", f"{number}")
    adapters.add("r", 2)
    assert [adapters.load_s("r", f"{number}") > 0 for number in range(SLOTS)] == [True] * (SLOTS - 2) + [False] * 2
    adapters.lose("r")
    assert adapters.load_s("r", f"{SLOTS - 1}") == INITIAL
    adapters.remove("r")
    assert not adapters.open("r", "a"), "nothing is learned of a replica that has left"


def test_the_load_time_is_learned() -> None:
    load = LoadTime()
    for number in range(60):
        load.learn(1, 0.3 if number % 4 else -0.1)
    assert load.value == pytest.approx(0.3, rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(-1e6, 1e6)), max_size=200))
def test_it_is_bounded(seen: list[tuple[int, float]]) -> None:
    load = LoadTime()
    for client, seconds in [*((number, 0.3) for number in range(2 * MAX_CLIENTS)), *seen]:
        load.learn(client, seconds)
        assert LEAST <= load.value <= MOST
        assert len(load._clients) <= MAX_CLIENTS


@pytest.mark.parametrize("lie", [-100.0, 100.0])
def test_one_client_of_three_does_not_move_it(lie: float) -> None:
    load = LoadTime()
    for client in (1, 2):
        for _ in range(40):
            load.learn(client, 0.3)
    before = load.value
    for _ in range(1000):
        load.learn(3, lie)
    assert load.value == pytest.approx(before, rel=0.25)
