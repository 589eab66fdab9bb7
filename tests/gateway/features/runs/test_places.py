"""Places of runs, against clients that invent owners."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.runs.places import SHARE, RunPlaces
from gateway.features.runs.runs import Runs
from gateway.features.runs.watching import WatchedRuns
from tests.gateway.conftest import running
from tests.gateway.features.responses.test_recall import RESPONSES, kept_in, replica


def flood(places: RunPlaces, address: str) -> int:
    """How many an address gets with a new owner for each."""
    got = 0
    while places.admit(f"{address} {got}", address):
        got += 1
        places.check()
    return got


def test_an_address_that_invents_owners_leaves_places_to_others() -> None:
    places = RunPlaces(1000, 200)
    assert [flood(places, address) for address in "abc"] == [900, 90, 9]
    assert places.admit("o", "d")
    places.release("a 0", "a")
    places.check()


def test_an_owner_has_a_bound_wherever_it_is() -> None:
    places = RunPlaces(1000, 200)
    assert sum(places.admit("o", str(number % 50)) for number in range(500)) == 200
    assert places.is_full("o")
    assert not places.is_full("other")
    places.release("o", "0")
    assert places.admit("o", "0")
    places.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans())))
def test_its_books_are_right(steps: list[tuple[int, int, bool]]) -> None:
    places, held = RunPlaces(12, 5), list[tuple[str, str]]()
    for owner, address, takes in steps:
        who = str(owner), str(address)
        if takes:
            mine = sum(one == who[0] for one, _ in held)
            here = sum(one == who[1] for _, one in held)
            assert places.admit(*who) == (mine < 5 and here < SHARE * (12 - len(held)))
            held = [*held, who] if places.taken > len(held) else held
        elif who in held:
            held.remove(who)
            places.release(*who)
        places.check()
        assert places.taken == len(held)


def test_those_that_follow_runs_of_other_processes_are_bounded_so_too() -> None:
    watched = WatchedRuns()
    assert flood(watched.places, "a") == 900
    assert watched.places.admit("o", "b")


async def test_a_flood_of_invented_credentials_leaves_places_to_another_address(tmp_path: Path) -> None:
    body = {"model": "m", "input": "a", "background": True}
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        flood(run.gateway[Runs].places, "127.0.0.1")
        for headers in ({}, {"Authorization": "Bearer never seen"}):
            status, answered, error = await run.post(body, RESPONSES, headers=headers)
            assert (status, answered["Retry-After"], error["error"]["code"]) == (429, "5", "too_many_background_responses")
        elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(connector=elsewhere) as session,
            session.post(run.url + RESPONSES, json=body) as answer,
        ):
            assert (await answer.json())["status"] == "queued"
    run.gateway[Runs].places.check()


@pytest.mark.parametrize("limit", [0, 1])
def test_small_limits(limit: int) -> None:
    assert flood(RunPlaces(limit, 5), "a") == limit
