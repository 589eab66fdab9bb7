"""What a breakpoint promises: the replica that keeps the prefix is chosen, or there is a reason."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router import Booking, Outcome, Prompt, Replica, Router
from router.events import decode, encode
from router.follower import Follower
from router.learning.promises import LEAST_TOKENS, WAIT_S
from router.replication_log import Journal
from tests.support.strategies import keys_of

FLEET = ["r1", "r2", "r3", "r4"]
BLOCK = 100  # units, which are tokens
BLOCKS = 40
RATE = 8000.0  # tokens per second, assumed by a new router


def router_of(**options: Any) -> Router:
    router = Router(**{"policy": "cost", "ttl_s": 300.0, "memory_bytes": 1 << 24, "chance": random.Random(3)} | options)
    for name in FLEET:
        router.add(Replica(name))
    return router


def prompt(text: bytes = bytes(BLOCKS), *marks: int, seconds: int = 300, client: int = 1, session: int = 0) -> Prompt:
    """marks: breakpoints, in blocks; none: the last block."""
    made = Prompt(keys_of(text), len(text) * BLOCK, BLOCK, "", client=client, session_key=session)
    made.breakpoints = tuple((mark, seconds) for mark in marks or (len(text),))
    return made


def answer(booking: Booking, now: float, cached: int | None = None) -> str:
    booking.first_token(now)
    booking.close(Outcome(True, booking.prompt.units, cached), now)
    return booking.chosen.replica


def busy(router: Router, name: str, seconds: float, now: float) -> Booking:
    """Something else, whose prefill takes so long, runs there."""
    units = int(seconds * router.ledger.of(name).rate.value)
    return router.choose(Prompt(b"", units, BLOCK, ""), [name], now)


def outcome(booking: Booking) -> tuple[str, str, int]:
    return booking.chosen.replica, booking.decision.promise, booking.decision.promised_tokens


def test_a_promise_is_kept_although_another_replica_would_be_sooner() -> None:
    router = router_of()
    home = answer(router.choose(prompt(), FLEET, 0.0), 0.5, 0)
    load = busy(router, home, WAIT_S * 0.9, 1.0)
    plain = prompt()
    plain.breakpoints = ()
    assert router.rank(plain, FLEET, 1.0)[0].best.replica != home, "by its cost it would go elsewhere"
    decision, ranking = router.rank(prompt(), FLEET, 1.0)
    assert (decision.best.replica, ranking[0].replica, decision.promise) == (home, home, "held")
    booking = router.choose(prompt(), FLEET, 1.0)
    assert outcome(booking) == (home, "held", BLOCKS * BLOCK)
    assert booking.decision.reason == "warm"
    answer(booking, 2.0)
    answer(load, 2.0)
    router.check()


def test_the_wait_is_bounded() -> None:
    router = router_of()
    home = answer(router.choose(prompt(), FLEET, 0.0), 1.0, 0)
    load = busy(router, home, WAIT_S * 1.5, 1.0)
    booking = router.choose(prompt(), FLEET, 1.0)
    assert booking.chosen.replica != home
    assert outcome(booking)[1:] == ("busy", BLOCKS * BLOCK)
    other = answer(booking, 2.0)
    assert outcome(router.choose(prompt(), FLEET, 2.0))[:2] == (other, "held"), "the promise moves on"
    answer(load, 3.0)


def test_without_patience_it_goes_by_the_cost() -> None:
    router = router_of(promise_wait_s=0.0)
    home = answer(router.choose(prompt(), FLEET, 0.0), 0.5, 0)
    load = busy(router, home, WAIT_S * 0.9, 1.0)
    assert outcome(router.choose(prompt(), FLEET, 1.0))[1] == "busy"
    answer(load, 2.0)


@pytest.mark.parametrize(("how", "expected"), [("gone", "gone"), ("restarted", "lost"), ("left", "lost")])
def test_a_promise_that_cannot_be_kept_has_a_reason(how: str, expected: str) -> None:
    router = router_of()
    home = answer(router.choose(prompt(), FLEET, 0.0), 1.0, 0)
    others = [name for name in FLEET if name != home]
    router.sweep(2.0)
    if how == "restarted":
        router.restarted(home)
    elif how == "left":
        router.remove(home)
        router.add(Replica(home))
    booking = router.choose(prompt(), others if how == "gone" else FLEET, 2.0)
    assert outcome(booking)[1:] == (expected, BLOCKS * BLOCK)
    answer(booking, 3.0)


def test_a_promise_lasts_as_long_as_the_client_wants_it() -> None:
    router = router_of()
    home = answer(router.choose(prompt(seconds=3600), FLEET, 0.0), 1.0, 0)
    booking = router.choose(prompt(seconds=3600), FLEET, 3000.0)
    assert booking.chosen.matched_blocks == 0, "the index has forgotten it"
    assert outcome(booking)[:2] == (home, "held")
    answer(booking, 3001.0)
    assert outcome(router.choose(prompt(), FLEET, 3002.0 + 3600))[1] == ""


def test_a_growing_conversation_keeps_the_promise_of_its_last_turn() -> None:
    router = router_of()
    text = bytes(BLOCKS)
    home = answer(router.choose(prompt(text, 20, 40), FLEET, 0.0), 1.0, 0)
    for turn in range(1, 10):
        text += bytes([turn % 3] * 5)
        load = busy(router, home, WAIT_S * 0.5, 10.0 * turn)
        again = prompt(text, len(text) - 5, len(text))
        booking = router.choose(again, FLEET, 10.0 * turn)
        assert outcome(booking) == (home, "held", (len(text) - 5) * BLOCK)
        answer(booking, 10.0 * turn + 1)
        answer(load, 10.0 * turn + 1)


def test_a_breakpoint_that_has_moved_on_is_found_by_looking_back() -> None:
    router = router_of()
    home = answer(router.choose(prompt(), FLEET, 0.0), 1.0, 0)
    longer = prompt(bytes(BLOCKS) + b"\x01\x01")
    longer.breakpoints += ((BLOCKS, 0),)
    assert outcome(router.choose(longer, FLEET, 2.0)) == (home, "held", BLOCKS * BLOCK)


def test_a_promise_is_made_to_its_owner_only() -> None:
    router = router_of()
    answer(router.choose(prompt(session=1), FLEET, 0.0), 1.0, 0)
    assert router.rank(prompt(session=1), FLEET, 2.0)[0].promise == "held"
    assert router.rank(prompt(session=2), FLEET, 2.0)[0].promise == ""
    assert router.rank(prompt(session=1, client=5), FLEET, 2.0)[0].promise == "held", "a session is an owner by itself"
    assert router.rank(prompt(client=7), FLEET, 2.0)[0].promise == ""


def test_short_prefixes_and_failed_requests_promise_nothing() -> None:
    router = router_of()
    short = bytes(LEAST_TOKENS // BLOCK)
    answer(router.choose(prompt(short), FLEET, 0.0), 1.0, 0)
    assert router.rank(prompt(short), FLEET, 2.0)[0].promise == ""
    booking = router.choose(prompt(bytes([1] * BLOCKS)), FLEET, 2.0)
    booking.close(Outcome(False), 3.0)
    assert router.rank(prompt(bytes([1] * BLOCKS)), FLEET, 3.0)[0].promise == ""


def test_routers_that_follow_each_other_keep_the_same_promises() -> None:
    journal = Journal(lambda: None)
    router, other = router_of(journal=journal), router_of(chance=random.Random(9))
    home = answer(router.choose(prompt(), FLEET, 0.0), 1.0, 0)
    Follower(other).apply(1, decode(encode(journal.take())))
    busy(other, home, WAIT_S * 0.9, 1.0)
    assert outcome(other.choose(prompt(), FLEET, 1.0)) == (home, "held", BLOCKS * BLOCK)


@pytest.mark.parametrize("policy", ["round_robin", "sticky", "least_loaded"])
def test_other_policies_promise_nothing(policy: str) -> None:
    router = router_of(policy=policy)
    answer(router.choose(prompt(), FLEET, 0.0), 1.0, 0)
    assert router.choose(prompt(), FLEET, 1.0).decision.promise == ""
