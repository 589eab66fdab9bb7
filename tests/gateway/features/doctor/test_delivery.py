"""A prefix that was there and not delivered has a cause in what is known of both requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.agents.dialogues import words
from gateway.features.doctor import causes
from gateway.features.doctor.delivery import undelivered
from gateway.features.doctor.observed import ObservedOutcome, ObservedRequest
from tests.gateway.features.doctor.conftest import Doctor

TEXT = words(random.Random(0), 8000)
TURN: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
NEXT = [*TURN, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
FIRST = {"replica": "a", "prompt_tokens": 2000, "cached_tokens": 0, "first_byte": 5.0}


def stream(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Two turns of a conversation, at 0 s and at 10 s, with what became of them."""
    return [
        {"body": {"model": "m", "messages": messages}, "time": time, "outcome": outcome}
        for messages, time, outcome in ((TURN, 0, FIRST | first), (NEXT, 10, {"prompt_tokens": 2010} | second))
    ]


@pytest.mark.parametrize(
    ("cause", "first", "second"),
    [
        (
            causes.EVICTED,
            {},
            {"replica": "a", "cached_tokens": 0, "reason": "warm", "available_tokens": 2000, "up": ["a", "b"]},
        ),
        (causes.EVICTED, {}, {"replica": "b", "cached_tokens": 0, "reason": "cold", "available_tokens": 0, "up": ["a", "b"]}),
        (causes.EVICTED, {}, {"replica": "b", "cached_tokens": 0, "reason": "cold", "available_tokens": 950, "up": ["a", "b"]}),
        (
            causes.SPILLED,
            {},
            {"replica": "b", "cached_tokens": 0, "reason": "cold", "available_tokens": 1050, "up": ["a", "b"]},
        ),
        (causes.SPILLED, {}, {"replica": "b", "cached_tokens": 0, "reason": "cold", "up": ["a", "b"]}),
        (
            causes.SPILLED,
            {},
            {"replica": "b", "cached_tokens": 0, "reason": "spill", "available_tokens": 2000, "up": ["a", "b"]},
        ),
        (causes.REPLICA_LOST, {}, {"replica": "b", "cached_tokens": 0, "reason": "cold", "available_tokens": 0, "up": ["b"]}),
        (causes.EVICTED, {}, {"replica": "a", "cached_tokens": 0, "reason": "warm", "available_tokens": 2000, "up": ["b"]}),
        (causes.CONCURRENT, {"first_byte": 12.0}, {"replica": "a", "cached_tokens": 0, "reason": "warm", "up": ["a"]}),
    ],
)
def test_each_cause(doctor: Doctor, cause: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    examination = doctor(stream(first, second))
    assert set(examination.sums) == {cause}
    assert examination.lost == pytest.approx(2000, rel=0.05)
    assert (examination.reported, examination.cached) == (4010, 0)


def test_no_more_is_cached_than_there_is(doctor: Doctor) -> None:
    """An engine may say anything."""
    examination = doctor(stream({}, {"replica": "a", "cached_tokens": 10**9}))
    assert examination.cached <= examination.reported / 2 + 10


@pytest.mark.parametrize("cached", [2000, 1804, None])
def test_what_is_delivered_or_not_reported_is_no_finding(doctor: Doctor, cached: int | None) -> None:
    """Engines cache whole blocks: a little less is no loss."""
    assert doctor(stream({}, {"replica": "a", "cached_tokens": cached})).sums == {}


@pytest.mark.parametrize(("reason", "cause"), [("spill", causes.SPILLED), ("cold", causes.EVICTED), ("", causes.EVICTED)])
def test_without_an_earlier_outcome_the_router_s_reason_is_the_cause(doctor: Doctor, reason: str, cause: str) -> None:
    first, second = stream({}, {"replica": "a", "cached_tokens": 0, "reason": reason})
    del first["outcome"]
    assert set(doctor([first, second]).sums) == {cause}


def test_a_beginning_that_is_not_known_is_not_in_the_future(doctor: Doctor) -> None:
    second = {"replica": "a", "cached_tokens": 0, "reason": "warm", "available_tokens": 2000, "up": ["a"]}
    assert set(doctor(stream({"first_byte": None}, second)).sums) == {causes.EVICTED}


def test_what_came_later_was_not_concurrent() -> None:
    """The records of several processes are not in order."""
    earlier, now = ObservedRequest("m", b"", 8000, 256), ObservedRequest("m", b"", 8000, 256)
    earlier.outcome, now.outcome = ObservedOutcome("a", first_byte=30.0), ObservedOutcome("a", cached_tokens=0)
    found = list[tuple[str, int] | None]()
    for earlier.time in (10.0, 20.0):
        now.time = 15.0
        found.append(undelivered(now, 2000, earlier))
    assert found == [(causes.CONCURRENT, 2000), (causes.EVICTED, 2000)]


@pytest.mark.parametrize(
    ("expected", "cached", "lost"), [(10_000, 9_001, 0), (10_000, 9_000, 1_000), (2_000, 1_745, 0), (2_000, 1_744, 256)]
)
def test_a_loss_is_a_tenth_and_a_few_blocks(expected: int, cached: int, lost: int) -> None:
    earlier, now = ObservedRequest("m", b"", 8000, 256), ObservedRequest("m", b"", 8000, 256)
    earlier.outcome, now.outcome = ObservedOutcome("a"), ObservedOutcome("a", cached_tokens=cached)
    assert undelivered(now, expected, earlier) == ((causes.EVICTED, lost) if lost else None)


@pytest.mark.parametrize("told", [0, 1, 1 << 50])
def test_counts_that_cannot_be_true_are_not_believed(doctor: Doctor, told: int) -> None:
    """An estimate is better than an engine that says that 8,000 bytes are one token."""
    examination = doctor(stream({"prompt_tokens": told}, {"replica": "a", "prompt_tokens": told}))
    assert examination.tokens == pytest.approx(4010, rel=0.05)
