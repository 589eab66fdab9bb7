"""Rows are right whatever a gateway sends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from gateway.commands.top.answers import Candidate, Decision, Key, Node
from gateway.commands.top.rows import Point, Pool, Replica, Request
from tests.gateway.commands.top.strategies import ROWS


def texts(value: Any) -> list[str]:
    """All in a row, and in what is in it."""
    if isinstance(value, str):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [text for each in value for text in texts(each)] if isinstance(value, list | tuple) else []


@given(ROWS)
def test_any_row_is_read_and_can_be_shown(row: dict[str, Any]) -> None:
    for kind in (Replica, Request, Pool, Point, Decision, Candidate, Node):
        for text in texts(kind.of(row)):
            assert text.isprintable() or set(text) & {"\ufffd"} or kind is Node
            assert len(text) <= 10_000
    key = Key.of(row, "2026-10-07T16:00:00Z")
    assert key.state in ("valid", "rotating", "expired", "revoked")
    replica, request = Replica.of(row), Request.of(row)
    assert replica.filled is None or replica.filled == replica.filled
    assert request.outcome
    assert isinstance(request.failed, bool)


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"up": True, "circuit": "closed"}, "up"),
        ({"up": True, "circuit": "half_open"}, "circuit half open"),
        ({"up": True, "draining": True}, "draining"),
        ({"up": False, "draining": True}, "down"),
        ({"up": True, "leaving": True}, "leaving"),
        ({"up": "yes"}, "down"),
    ],
)
def test_the_state_of_a_replica(row: dict[str, Any], state: str) -> None:
    assert Replica.of(row).state == state


def test_what_is_not_counted_yet_is_guessed() -> None:
    running = Request.of({"key": "a", "state": "running", "estimated_prompt_tokens": 100, "predicted_cached_tokens": 60})
    assert (running.prompt, running.cached, running.guessed, running.outcome) == (100, 60, True, "running")
    counted = {"prompt_tokens": 90, "cached_tokens": 0, "estimated_prompt_tokens": 100}
    ended = Request.of({"state": "ended", "status": 200, **counted})
    assert (ended.prompt, ended.cached, ended.guessed, ended.outcome, ended.failed) == (90, 0, False, "200", False)
    assert Request.of({"state": "ended", "status": 499}).outcome == "left"
    assert Request.of({"state": "ended", "status": 200, "error": "cut"}).failed
    assert not Request.of({"state": "ended", "status": 429, "error": "too many"}).failed
