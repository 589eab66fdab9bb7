"""The feed of requests: its rows, its versions, its bounds."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.features.live_page.feed import BURST, MAX_ROWS, PAGE_ROWS, QUIET_S, RATE_PER_S, Feed


def made() -> Feed:
    numbers = itertools.count(1)
    return Feed(lambda: f"ring{next(numbers)}")


def row(text: str, **more: Any) -> dict[str, Any]:
    return {"id": text, **more}


def test_nothing_is_kept_until_somebody_asks() -> None:
    feed = made()
    events = list[str]()
    feed.begin, feed.end = lambda: events.append("begin"), lambda: events.append("end")
    assert not feed.on
    feed.page({}, 0.0)
    assert (feed.on, events) == (True, ["begin"])
    feed.put(feed.number(1.0), row("a"))
    feed.sweep(QUIET_S)
    assert len(feed) == 1
    feed.sweep(QUIET_S + 1)
    assert (feed.on, len(feed), events) == (False, 0, ["begin", "end"])
    feed.check()


def test_a_row_is_shown_again_when_it_changes() -> None:
    feed = made()
    feed.page({}, 0.0)
    one, other = feed.number(0.0), feed.number(0.0)
    feed.put(one, row("a", state="running"), lambda: {"policy": "cost"})
    feed.put(other, row("b"))
    page = feed.page({}, 0.0)
    assert [each["id"] for each in page["rows"]] == ["a", "b"]
    assert [each["key"] for each in page["rows"]] == ["ring1:1", "ring1:2"]
    feed.put(one, row("a", state="ended"))
    later = feed.page({"ring1": page["last"]}, 0.0)
    assert [(each["key"], each["state"]) for each in later["rows"]] == [("ring1:1", "ended")]
    explained = feed.explain("ring1:1")
    assert explained is not None
    assert explained["decision"] == {"policy": "cost"}, "the reasons stay"
    assert explained["request"]["state"] == "ended"


def test_what_is_no_key_explains_nothing() -> None:
    feed = made()
    assert feed.explain(":") is None
    feed.page({}, 0.0)
    feed.put(feed.number(0.0), row("a"))
    for key in ("", ":", "ring1", "ring1:", "ring1:x", "ring1:²", "ring1:2", "ring2:1", "ring1:" + "9" * 5000, "ring1:-1"):
        assert feed.explain(key) is None, key


def test_a_flood_is_sampled_and_counted() -> None:
    feed = made()
    feed.page({}, 0.0)
    numbers = [feed.number(step / 1000) for step in range(1, 5001)]  # 1,000 a second, for 5 s
    shown = sum(number > 0 for number in numbers)
    assert abs(shown - (BURST + 5 * RATE_PER_S)) <= 1
    assert feed.hidden == len(numbers) - shown
    for number in numbers:
        feed.put(number, row("x" * 10))
    feed.check()
    assert len(feed) == min(MAX_ROWS, shown)
    assert len(feed.page({}, 5.0)["rows"]) == PAGE_ROWS


def test_a_request_of_an_earlier_watch_has_no_row() -> None:
    feed = made()
    feed.page({}, 0.0)
    old = feed.number(0.0)
    feed.sweep(QUIET_S + 1)
    feed.page({}, QUIET_S + 2)
    new = feed.number(QUIET_S + 2)
    feed.put(new, row("new"))
    feed.put(old, row("old"))
    feed.put(new + 1, row("never given"))
    assert [each["id"] for each in feed.page({}, QUIET_S + 3)["rows"]] == ["new"]
    feed.check()


@given(st.lists(st.one_of(st.none(), st.integers(1, 30)), max_size=200))
def test_pages_bring_each_change_once_and_the_last_state(steps: list[int | None]) -> None:
    """None: a watcher asks; a number: that row changes. Against a dictionary."""
    feed = made()
    cursor = {"ring1": feed.page({}, 0.0)["last"]}
    for _ in range(30):
        feed.number(0.0)
    truth, seen = dict[int, int](), dict[int, int]()
    for at, step in enumerate([*steps, None]):
        if step is not None:
            truth[step] = at
            feed.put(step, row(str(step), at=at))
            continue
        page = feed.page(cursor, 0.0)
        cursor = {"ring1": page["last"]}
        for each in page["rows"]:
            number = int(each["id"])
            assert seen.get(number) != each["at"], "shown twice"
            seen[number] = each["at"]
        feed.check()
    assert seen == truth
