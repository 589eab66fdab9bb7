"""What is known of a gateway: bounded, and counted once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.top.state import KEPT_REQUESTS, MOST_NAMES, OTHERS, Live
from gateway.commands.top.summary import figures, head
from tests.gateway.commands.top.strategies import FRAMES, SCALARS


def ended(number: int, **fields: Any) -> dict[str, Any]:
    row = {"key": f"a:{number}", "state": "ended", "status": 200, "time": number, "model": "m", "tenant": "t"}
    return {**row, "prompt_tokens": 100, "cached_tokens": 50, "cost_usd": 0.5, "saved_usd": 0.25, **fields}


@given(st.lists(st.tuples(st.sampled_from(["hello", "frame", "problem", "x"]), st.one_of(SCALARS, FRAMES)), max_size=5))
def test_whatever_comes_is_taken(events: list[tuple[str, Any]]) -> None:
    live = Live()
    for event, value in events:
        live.take(event, value)
        live.check()
        assert head(live).isprintable()
        assert all(figures(live))
    assert live.revision == len(events)


def test_the_oldest_requests_go() -> None:
    live = Live()
    for at in range(0, 1000, 50):
        live.take("frame", {"requests": [ended(number) for number in range(at, at + 50)]})
    live.check()
    assert list(live.requests) == [f"a:{number}" for number in range(1000 - KEPT_REQUESTS, 1000)]
    assert live.models["m"].requests == 1000


def test_a_flood_of_one_event_is_cut() -> None:
    live = Live()
    numbers = range(5000)
    live.take("hello", {"requests": [ended(at) for at in numbers], "replicas": [{"name": str(at)} for at in numbers]})
    live.check()
    assert len(live.requests) == KEPT_REQUESTS


def test_a_request_is_counted_when_it_has_ended_and_once() -> None:
    live = Live()
    live.take("hello", {"requests": [{"key": "a:1", "state": "running", "model": "m"}]})
    assert not live.models
    live.take("frame", {"requests": [ended(1)]})
    live.take("frame", {"requests": [ended(1)]})
    live.take("hello", {"requests": [ended(1)]})  # after a reconnection
    assert (live.models["m"].requests, live.models["m"].cost, live.tenants["t"].cached) == (1, 0.5, 50)


def test_names_are_bounded() -> None:
    live = Live()
    for number in range(500):
        live.take("frame", {"requests": [ended(number, model=f"m{number}", tenant="")]})
    live.check()
    assert len(live.models) == MOST_NAMES
    assert live.models[OTHERS].requests == 500 - (MOST_NAMES - 1)
    assert live.tenants["(none)"].requests == 500


def test_totals_are_of_the_last_steps() -> None:
    live = Live()
    points = [{"time": 2 * at, "requests": 4, "prompt_tokens": 100, "cached_tokens": 25, "saved_usd": 1} for at in range(20)]
    live.take("hello", {"step_s": 2, "points": points, "version": "1"})
    totals = live.totals(10)
    assert (totals.seconds, totals.requests, totals.hits, totals.saved) == (10, 20, 0.25, 5)
    assert figures(live)[:2] == ["2.0 req/s", "25% cached"]


def test_what_has_no_row_is_told() -> None:
    live = Live()
    assert live.shown_share == 1
    live.take("frame", {"ended": 100, "hidden": 75})
    assert live.shown_share == 0.25


def test_a_problem_is_told_until_the_next_frame() -> None:
    live = Live()
    live.take("problem", {"problem": "the workers\x1b[2J do not answer"})
    assert live.problem == "the workers\ufffd[2J do not answer"
    live.take("frame", {})
    assert live.problem == ""
