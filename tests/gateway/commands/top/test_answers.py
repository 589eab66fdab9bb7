"""Answers to what an operator asks: a node, a key."""

from __future__ import annotations

from gateway.commands.top.answers import Key, Node


def test_a_way_that_is_none_is_not_asked_for() -> None:
    assert Node.of({"way": "00ff.0a"}).way == "00ff.0a"
    assert Node.of({"way": "00ff&depth=4"}).way == ""


def test_what_is_below_a_node_is_read_one_level_deep() -> None:
    below = {"way": "00", "shown": [{"way": "00.01", "shown": [{"way": "00.01.02"}]}]}
    [child] = Node.of(below).shown
    assert (child.way, child.shown) == ("00.01", ())


def test_the_state_of_a_key() -> None:
    now = "2026-10-07T16:00:00Z"
    assert Key.of({}, now).state == "valid"
    assert Key.of({"expires_at": "2026-10-07"}, now).state == "expired"
    assert Key.of({"expires_at": "2031-01-01"}, now).state == "valid"
    assert Key.of({"rotated_until": "2026-10-07T17:00:00Z"}, now).state == "rotating"
    assert Key.of({"revoked_at": "2026-10-01T00:00:00Z", "expires_at": "2026-01-01"}, now).state == "revoked"
