"""Events as bytes: whatever is encoded comes back, and whatever is decoded can be applied."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router import Outcome, Prompt, Replica, Router
from router.events import (
    BookingClosed,
    BookingFirstToken,
    BookingMoved,
    BookingOpened,
    CacheLost,
    Event,
    EventError,
    ObjectStored,
    Rent,
    decode,
    encode,
)
from router.follower import Follower
from router.replication_log import MAX_TOKENS, Journal
from tests.support.strategies import keys_of, prompt_of

counts = st.integers(0, 2**40)
numbers = st.integers(1, 5)
times = st.floats(-1e6, 1e6)
names = st.sampled_from(["r1", "r2", "unknown", ""])
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        BookingOpened,
        number=numbers,
        keys=st.binary(max_size=20),
        units=counts,
        block_units=numbers,
        scale=st.sampled_from(["", "m"]),
        client=st.integers(0, 2**64 - 1),
        origin=st.integers(0, 2**64 - 1),
        session_key=st.integers(0, 2**64 - 1),
        breakpoints=st.lists(st.tuples(numbers, counts), max_size=3).map(tuple),
        replica=names,
        matched_blocks=counts,
        prompt_tokens=counts,
        uncached_tokens=counts,
        since=times,
        silent=st.booleans(),
        unseen=counts,
        images=counts,
    ),
    st.builds(BookingFirstToken, numbers, times),
    st.builds(BookingMoved, numbers, names, counts, counts, counts, times, counts),
    st.builds(
        BookingClosed, numbers, st.booleans(), st.none() | counts, st.none() | counts, times, st.booleans(), st.booleans()
    ),
    st.builds(Rent, st.binary(max_size=8), st.none() | times),
    st.builds(CacheLost, names),
    st.builds(ObjectStored, st.integers(0, 2**64 - 1), names, names, times),
)


@given(st.lists(events, max_size=12))
def test_what_is_encoded_comes_back(some: list[Event]) -> None:
    assert decode(encode(some)) == some


LARGE = BookingOpened(
    number=1,
    keys=b"",
    units=0,
    block_units=1,
    scale="",
    client=0,
    origin=0,
    session_key=0,
    breakpoints=((1, 300), (2**40, 3600)),
    replica="r1",
    matched_blocks=0,
    prompt_tokens=0,
    uncached_tokens=2**40,
    since=-1.0,
    silent=False,
    unseen=2**40,
    images=2**40,
)
HELD = BookingOpened(
    number=1,
    keys=bytes(8),
    units=0,
    block_units=1,
    scale="",
    client=0,
    origin=0,
    session_key=0,
    breakpoints=(),
    replica="r2",
    matched_blocks=0,
    prompt_tokens=0,
    uncached_tokens=0,
    since=0.0,
    silent=False,
    unseen=0,
    images=0,
)
RETURNED_WITH_MORE_UNCACHED_THAN_ALL = [HELD, BookingFirstToken(1, 0.0), BookingMoved(1, "r2", 0, 0, 2**40, 0.0, 0)]


@given(st.lists(events, max_size=12), st.booleans())
@example([LARGE, BookingFirstToken(1, 0.0)], False)
@example(RETURNED_WITH_MORE_UNCACHED_THAN_ALL, False)
def test_whatever_decodes_can_be_applied_and_undone(some: list[Event], past: bool) -> None:
    """Events that no router would send, in an order that makes no sense."""
    router = Router(policy="cost", ttl_s=10, memory_bytes=1 << 16, chance=random.Random(1))
    for name in ("r1", "r2"):
        router.add(Replica(name, 100))
    follower = Follower(router)
    follower.apply(1, decode(encode(some)), past=past)
    follower.check()
    router.check()
    follower.leave(1, 0.0)
    assert router.ledger.open_leases == 0
    router.check()


@given(st.binary(max_size=60), st.lists(events, max_size=3), st.integers(0, 500))
@example(b"\xdd\xff\xff\xff\xff", [], 0)
def test_other_bytes_are_an_error(junk: bytes, some: list[Event], flip: int) -> None:
    for data in (junk, damaged(encode(some), flip)):
        with contextlib.suppress(EventError):  # anything else is a bug
            assert isinstance(decode(data), list)


def damaged(data: bytes, flip: int) -> bytes:
    changed = bytearray(data)
    changed[flip % len(changed)] ^= 1 << flip % 8
    return bytes(changed)


@pytest.mark.parametrize(
    "event",
    [
        [1, 0, 1.0],
        [1, 3],
        [9, 3, 1.0],
        [3, 1, True, -1, None, 1.0],
        [2, 1, "r1", 1, -5, 1, 0.0],
        [1, "3", 1.0],
        ["open"],
        {},
        None,
    ],
    ids=str,
)
def test_an_event_that_cannot_be_is_refused(event: object) -> None:
    with pytest.raises(EventError):
        decode(msgspec.msgpack.encode([event]))


@pytest.mark.parametrize("tokens", [-1, MAX_TOKENS + 1, 10**30])
def test_a_count_that_no_engine_can_mean_is_not_sent(tokens: int) -> None:
    journal = Journal(lambda: None)
    router = Router(policy="cost", ttl_s=10, memory_bytes=1 << 16, chance=random.Random(1), journal=journal)
    router.add(Replica("r1"))
    router.choose(prompt_of(b"abc"), ["r1"], 0.0).close(Outcome(True, tokens, tokens), 1.0)
    (closed,) = (event for event in decode(encode(journal.take())) if isinstance(event, BookingClosed))
    assert (closed.prompt_tokens, closed.cached_tokens) == (None, None)


def test_a_prompt_comes_back_with_all_that_routes_it() -> None:
    journal = Journal(lambda: None)
    router = Router(policy="cost", ttl_s=10, memory_bytes=1 << 16, chance=random.Random(1), journal=journal)
    router.add(Replica("r1"))
    router.choose(Prompt(keys_of(b"abc"), 500, 128, "m", "alice", 2**64 - 1), ["r1"], 3.5)
    (opened,) = decode(encode(journal.take()))
    assert isinstance(opened, BookingOpened)
    assert (opened.keys, opened.units, opened.block_units, opened.scale) == (keys_of(b"abc"), 500, 128, "m")
    assert (opened.client, opened.replica, opened.since) == (2**64 - 1, "r1", 3.5)
