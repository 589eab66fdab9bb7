"""A router that begins with another one's snapshot decides as that one would go on to."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import struct
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router import Outcome, Prompt, Replica, Router
from router.learning.conversations import ConversationWork
from router.learning.objects import MAX_OBJECTS
from router.replication_log import MAX_BLOCKS
from router.snapshot.collect import collect
from router.snapshot.records import (
    GeneralRecord,
    HeldRecord,
    LearnedRecord,
    ObjectEntry,
    PromiseEntry,
    Record,
    RecordError,
    ScaleRecord,
    SessionEntry,
    decode,
    encode,
)
from router.snapshot.restore import MAX_DEPTH, Restorer
from router.types import KEY_BYTES
from tests.support.strategies import keys_of, letters, replicas

FLEET = ["r1", "r2", "r3"]


def router_of(capacity: int | None = None, memory_bytes: int = 1 << 24, ttl_s: float = 900.0) -> Router:
    router = Router(policy="cost", ttl_s=ttl_s, memory_bytes=memory_bytes, chance=random.Random(3))
    for name in FLEET:
        router.add(Replica(name, capacity))
    return router


def records_of(router: Router, now: float, since_s: float = float("inf")) -> list[Record]:
    return [record for slice_ in collect(router, now, since_s) for record in decode(encode(slice_))]


def never(_name: str) -> bool:
    return False


def restore(router: Router, records: list[Record], at: float, lost: Callable[[str], bool] = never) -> Restorer:
    restorer = Restorer(router, at, at)
    restorer.add(records)
    for _ in restorer.steps(lost):
        pass
    router.check()
    return restorer


def copy_of(router: Router, now: float, **made: float) -> Router:
    other = router_of(**made)  # type: ignore[arg-type]
    restore(other, records_of(router, now), now)
    return other


def serve(router: Router, prompt: Prompt, now: float, cached: int | None = None, replica: str | None = None) -> str:
    booking = router.choose(prompt, [replica] if replica else FLEET, now)
    booking.first_token(now + 0.5)
    booking.close(Outcome(True, prompt.units, cached), now + 0.6)
    return booking.lease.replica


# -- the index

uses = st.lists(st.tuples(replicas, letters, st.sampled_from([0.0, 0.0, 1.0, 3.0])), max_size=40)


@given(uses, st.sampled_from([None, 5, 12]), letters, replicas)
def test_the_copy_matches_as_the_original_does_and_evicts_in_the_same_order(
    history: list[tuple[str, bytes, float]], capacity: int | None, more: bytes, at: str
) -> None:
    router, now = router_of(capacity), 1000.0
    for name, text, pause in history:
        now += pause
        router.trie.insert(name, keys_of(text), now, weight=1000)
    copy = copy_of(router, now, capacity=capacity)
    asked = [text for _, text, _ in history] + [more]
    for text in asked:
        assert copy.trie.match(keys_of(text), now) == router.trie.match(keys_of(text), now)
    assert copy.trie.held() == router.trie.held()
    for each in (router, copy):
        each.trie.insert(at, keys_of(more * 3), now + 1, weight=1000)
        each.check()
    for text in asked:
        assert copy.trie.match(keys_of(text), now + 1) == router.trie.match(keys_of(text), now + 1)


@given(uses, uses, st.integers(0, 60))
def test_the_index_may_change_while_it_is_collected(
    before: list[tuple[str, bytes, float]], meanwhile: list[tuple[str, bytes, float]], purge_after: int
) -> None:
    """What is written is true at some moment of the collection, and what was there all the time is written."""
    router, now = router_of(), 1000.0
    for name, text, pause in before:
        now += pause
        router.trie.insert(name, keys_of(text), now, weight=1000)
    first = {text: router.trie.match(keys_of(text), now) for _, text, _ in before}
    records: list[Record] = []
    for count, slice_ in enumerate(collect(router, now, size=1)):
        records += slice_
        if count < len(meanwhile):
            name, text, pause = meanwhile[count]
            now += pause
            router.trie.insert(name, keys_of(text), now, weight=1000)
        if count == purge_after:
            router.restarted("r2")
    copy = router_of()
    restore(copy, records, now)
    assert all(isinstance(record, HeldRecord) for record in records if not isinstance(record, LearnedRecord | GeneralRecord))
    for text, matched in first.items():
        late = router.trie.match(keys_of(text), now)
        copied = copy.trie.match(keys_of(text), now)
        for name in ("r1", "r3"):
            assert matched.get(name, 0) <= copied.get(name, 0) <= max(matched.get(name, 0), late.get(name, 0))


def test_a_prefix_of_many_prompts_is_written_once() -> None:
    router = router_of()
    shared = bytes(range(200))
    for tail in range(50):
        router.trie.insert("r1", keys_of(shared + bytes([tail])), float(tail), weight=1000)
    router.trie.insert("r2", keys_of(shared), 60.0, weight=1000)
    keys = sum(len(record.keys) for record in records_of(router, 100.0) if isinstance(record, HeldRecord))
    assert keys == (200 + 50) * 8


def test_of_half_a_snapshot_the_better_half_is_there() -> None:
    router = router_of()
    for number in range(100):
        router.trie.insert("r1", keys_of(bytes([number, 7])), float(number), weight=1000)
    held = [record for record in records_of(router, 100.0) if isinstance(record, HeldRecord)]
    assert [record.age for record in held] == sorted(record.age for record in held)
    assert len(held) == 100


def test_since() -> None:
    router = router_of()
    for number in range(100):
        router.trie.insert("r1", keys_of(bytes([number, 7])), float(number), weight=1000)
    held = [record for record in records_of(router, 100.0, 10.5) if isinstance(record, HeldRecord)]
    assert sorted(record.age for record in held) == [float(age) for age in range(1, 11)]


def test_what_has_expired_meanwhile_is_left_out() -> None:
    router = router_of(ttl_s=100.0)
    router.trie.insert("r1", keys_of(b"old"), 0.0, weight=1000)
    router.trie.insert("r1", keys_of(b"new"), 90.0, weight=1000)
    records = records_of(router, 95.0)
    copy = router_of(ttl_s=100.0)
    restorer = Restorer(copy, at=1000.0, now=1050.0)  # it was written 50 s ago
    restorer.add(records)
    for _ in restorer.steps(never):
        pass
    assert copy.trie.match(keys_of(b"new"), 1050.0) == {"r1": 3}
    assert copy.trie.match(keys_of(b"old"), 1050.0) == {}
    assert copy.trie.match(keys_of(b"new"), 1096.0) == {}, "its age goes on"


def test_requests_in_flight_are_not_written() -> None:
    router = router_of()
    home = serve(router, Prompt(keys_of(b"abc"), 3, 1, ""), 1.0)
    router.choose(Prompt(keys_of(b"abcdef"), 6, 1, ""), [home], 2.0)
    copy = copy_of(router, 3.0)
    assert copy.trie.match(keys_of(b"abcdef"), 3.0) == {home: 3}


def test_a_replica_that_has_restarted_gets_nothing_back() -> None:
    router = router_of()
    for name in FLEET:
        router.trie.insert(name, keys_of(b"abc"), 1.0, weight=1000)
    prompt = Prompt(keys_of(b"xyz"), 3, 1, "", session_key=7)
    serve(router, prompt, 2.0, replica="r2")
    copy = router_of()
    restore(copy, records_of(router, 3.0), 3.0, lambda name: name == "r2")
    assert copy.trie.match(keys_of(b"abc"), 3.0) == {"r1": 3, "r3": 3}
    assert copy.sessions.find(7) is None
    assert copy.ledger.loads["r2"].rate.value == router.ledger.loads["r2"].rate.value, "its speed is that of its machine"


def test_a_replica_that_joins_later_gets_what_was_left() -> None:
    router = router_of()
    for name in FLEET:
        router.trie.insert(name, keys_of(b"abc"), 1.0, weight=1000)
    copy = Router(policy="cost", ttl_s=900.0, memory_bytes=1 << 24, chance=random.Random(3))
    copy.add(Replica("r1"))
    restorer = restore(copy, records_of(router, 3.0), 3.0)
    assert restorer.waiting == ["r2", "r3"]
    copy.add(Replica("r3"))
    for _ in restorer.steps(never):
        pass
    assert copy.trie.match(keys_of(b"abc"), 3.0) == {"r1": 3, "r3": 3}
    assert restorer.waiting == ["r2"]


def answer(router: Router, replica: str, text: bytes, now: float, session: int) -> None:
    """A prompt of a session, with a breakpoint in it."""
    prompt = Prompt(keys_of(text), 100_000 * len(text), 100_000, "m", session_key=session)
    prompt.breakpoints = ((len(text), 3600),)
    serve(router, prompt, now, replica=replica)


def known_of(router: Router, names: list[str]) -> list[object]:
    """What a router knows of these replicas."""
    trie, sessions, promises = router.trie, router.sessions.entries(), router.promises.entries()
    return [
        {replica: blocks for replica, blocks in trie.held().items() if replica in names},
        sorted((number, name, last) for number, one, _ in sessions for name, last in one.holders.items() if name in names),
        sorted((number, promise.replica, promise.made) for number, promise in promises if promise.replica in names),
        [(name, router.purged_at(name), router.learned_capacity(name)) for name in names],
    ]


answers = st.lists(st.tuples(replicas, st.binary(min_size=1, max_size=3), st.integers(1, 6)), max_size=12)


@example([("r1", b"1\x00", 1)], [("r1", b"1", 1), ("r2", b"1\x00", 1)], set(), set())
@given(answers, answers, st.sets(replicas), st.sets(replicas))
def test_what_a_router_has_learned_by_itself_stays(
    theirs: list[tuple[str, bytes, int]], ours: list[tuple[str, bytes, int]], lost: set[str], late: set[str]
) -> None:
    """Whatever a snapshot has of the same replicas, or of others of their names; of those nothing is taken in."""
    other, router = router_of(), router_of()
    for late_one in late:
        router.remove(late_one)
    for count, (name, text, session) in enumerate(theirs):
        answer(other, name, text, 10.0 + count, session)
    for count, (name, text, session) in enumerate(ours):
        if name not in late:
            answer(router, name, text, 15.5 + count, session)
    now, present, joining = 30.0, sorted(lost - late), sorted(lost & late)
    before = known_of(router, present)
    matched = {text: router.trie.match(keys_of(text), now) for _, text, _ in ours}
    promised = dict(router.promises.entries())
    restorer = restore(router, records_of(other, now), now, lambda name: name in lost)
    for late_one in late:
        router.add(Replica(late_one))
    for _ in restorer.steps(lambda name: name in lost):
        pass
    router.check()
    assert restorer.waiting == []
    assert known_of(router, present) == before
    assert known_of(router, joining)[:3] == [dict.fromkeys(joining, 0), [], []]
    for text, found in matched.items():
        longer = router.trie.match(keys_of(text), now)
        assert all(longer.get(name, 0) >= blocks for name, blocks in found.items())
    assert promised.items() <= dict(router.promises.entries()).items()


def test_a_replica_of_which_a_snapshot_is_wrong_keeps_what_is_known_of_it_here() -> None:
    """Another gateway is late to notice that it has restarted, or has another one of its name."""
    other, router = router_of(), router_of()
    other.trie.insert("r1", keys_of(b"old"), 10.0, weight=1000)
    for number in range(100):
        answer(router, "r1", bytes([number, 1]), 20.0 + number / 10, number + 1)
    held, promised = router.trie.held_by("r1"), len(router.promises)
    restore(router, records_of(other, 40.0), 40.0, lambda _: True)
    assert router.trie.held_by("r1") == held == 200
    assert router.trie.match(keys_of(b"old"), 40.0) == {}
    session = router.sessions.find(50)
    assert session is not None
    assert router.sessions.held(session, "r1", 0.0) > 0
    assert len(router.promises) == promised > 0
    assert not any(router.promises.is_lost(promise) for _, promise in router.promises.entries())


def test_of_a_replica_that_joins_late_sessions_and_promises_wait_too() -> None:
    """Until it is known whether it is the same one."""
    other = router_of()
    for count, (name, session) in enumerate((("r1", 1), ("r2", 1), ("r3", 1), ("r2", 2), ("r3", 3))):
        answer(other, name, bytes([session]), 10.0 + count, session)
    copy = Router(policy="cost", ttl_s=900.0, memory_bytes=1 << 24, chance=random.Random(3))
    copy.add(Replica("r1"))
    restorer = restore(copy, records_of(other, 20.0), 20.0)
    holders = {number: list(session.holders) for number, session, _ in copy.sessions.entries()}
    assert holders == {1: ["r1"]}
    for name in ("r3", "r2"):
        copy.add(Replica(name))
        for _ in restorer.steps(lambda name: name == "r2"):
            pass
    holders = {number: list(session.holders) for number, session, _ in copy.sessions.entries()}
    assert holders == {1: ["r1", "r3"], 3: ["r3"]}
    assert {promise.replica for _, promise in copy.promises.entries()} == {"r3"}
    assert copy.purged_at("r2") == float("-inf")


def test_what_was_purged_here_does_not_come_back() -> None:
    router = router_of()
    router.trie.insert("r1", keys_of(b"abc"), 1.0, weight=1000)
    records = records_of(router, 2.0)
    copy = router_of()
    copy.trie.insert("r1", keys_of(b"other"), 3.0, weight=1000)
    copy.restarted("r1")
    restore(copy, records, 2.0)
    assert copy.trie.match(keys_of(b"abc"), 4.0) == {}


# -- what was learned


def test_the_copy_decides_with_what_was_learned() -> None:
    router = router_of()
    for turn in range(40):
        prompt = Prompt(keys_of(bytes([turn % 8] * 50)), 5000, 100, "m", session_key=turn % 8 + 1)
        prompt.breakpoints = ((40, 3600),)
        serve(router, prompt, 10.0 * turn, cached=100 * (turn % 7))
    router.stored(99, "r2", "model", 400.0)
    router.rents.pay(b"prefix--", 1.5)
    router.sessions.learn(3, 0, 100.0, 70.0)
    now = 401.0
    copy = copy_of(router, now)
    assert copy.units_per_token("m") == router.units_per_token("m")
    assert copy.ledger.turn_gap.value == router.ledger.turn_gap.value
    assert copy.rents.paid(b"prefix--") == 1.5
    assert copy.objects.find(99, now) == ("r2", "model")
    assert len(copy.promises) == len(router.promises) > 0
    for name in FLEET:
        assert copy.ledger.of(name).rate.value == router.ledger.of(name).rate.value
        assert copy.ledger.of(name).return_rate(now, 15.0) == pytest.approx(router.ledger.of(name).return_rate(now, 15.0))
        assert copy.learned_capacity(name) == router.learned_capacity(name)
    for number in range(1, 9):
        ours, theirs = copy.sessions.find(number), router.sessions.find(number)
        assert ours is not None
        assert theirs is not None
        assert list(ours.holders) == list(theirs.holders)
        assert copy.sessions.share(ours, 0) == pytest.approx(router.sessions.share(theirs, 0))
    for name in FLEET:
        load = router.ledger.of(name)
        load.worked, load.rate.pool.conversation = 0.0, ConversationWork()  # of the last minutes, and in no snapshot
    for text in (bytes([3] * 50), bytes([77] * 50)):
        prompt = Prompt(keys_of(text), 5000, 100, "m", session_key=4)
        ours_, theirs_ = (each.rank(prompt, FLEET, now)[1] for each in (copy, router))
        assert [c.replica for c in sorted(ours_)] == [c.replica for c in sorted(theirs_)]
        assert [c.cost.total_s for c in sorted(ours_)] == pytest.approx([c.cost.total_s for c in sorted(theirs_)])


def test_what_was_learned_here_stays() -> None:
    router, other = router_of(), router_of()
    prompt = Prompt(keys_of(b"a" * 50), 5000, 100, "m", session_key=5)
    serve(router, prompt, 1.0, replica="r1")
    serve(other, prompt, 1.0, replica="r2")
    other.rents.pay(b"prefix--", 1.0)
    router.rents.pay(b"prefix--", 5.0)
    rate = other.ledger.of("r2").rate.value
    restore(other, records_of(router, 2.0), 2.0)
    session = other.sessions.find(5)
    assert session is not None
    assert list(session.holders) == ["r2"]
    assert other.ledger.of("r2").rate.value == rate
    assert other.rents.paid(b"prefix--") == 1.0
    assert other.trie.match(prompt.keys, 2.0) == {"r1": 50, "r2": 50}


def test_bounds_hold_although_a_snapshot_is_larger() -> None:
    router = router_of()
    for number in range(MAX_OBJECTS + 10):
        router.objects.put(number, "r1", "m", 1.0)
    for number in range(3000):
        router.trie.insert("r1", keys_of(number.to_bytes(3, "big")), 1.0 + number, weight=1000)
    records = records_of(router, 3001.0)
    small = router_of(memory_bytes=200_000)
    restore(small, records, 3001.0)
    assert small.trie.size_bytes <= 200_000
    assert small.trie.match(keys_of((2999).to_bytes(3, "big")), 3001.0) == {"r1": 3}, "the latest are kept"
    assert len(small.objects) == MAX_OBJECTS


# -- nonsense

LEARNED = LearnedRecord("r1", None, 0.0, 0.0, None, 0, False)


@pytest.mark.parametrize(
    "records",
    [
        [HeldRecord(0, 0, 0, b"x" * 8, 1, 0.0)],  # no such replica
        [LEARNED, HeldRecord(0, 1, 0, b"x" * 8, 1, 0.0)],  # no such prefix
        [LEARNED, HeldRecord(0, 0, 1, b"x" * 8, 1, 0.0)],  # begins with nothing
        [LEARNED, HeldRecord(0, 0, 0, b"x" * 7, 1, 0.0)],
        [LEARNED, HeldRecord(0, 0, 0, b"", 1, 0.0)],
        [LEARNED, HeldRecord(0, 0, 0, b"x" * 16, 1, 0.0), HeldRecord(0, 1, 3, b"", 1, 0.0)],
        [
            LEARNED,
            HeldRecord(0, 0, 0, b"x" * 8, 1, 0.0),
            *(HeldRecord(0, number, 1, b"x" * 8, 1, 0.0) for number in range(1, 3)),
            *(HeldRecord(0, number, number, b"x" * 8, 1, 0.0) for number in range(3, MAX_DEPTH + 2)),
        ],
    ],
)
def test_what_cannot_be_is_refused(records: list[Record]) -> None:
    with pytest.raises(RecordError):
        Restorer(router_of(), 0.0, 0.0).add(records)


numbers = st.sampled_from([0, 1, 2, 7, (1 << 60)])
ages = st.sampled_from([0.0, 1.0, 1e9])
sums = st.sampled_from([(1e15, 1e-9), (1e-9, 1e15), (1.0, 1.0)])
nonsense = st.lists(
    st.builds(
        LearnedRecord,
        st.sampled_from(["r1", "r9", ""]),
        st.none() | sums,
        ages,
        ages,
        st.sampled_from([None, 1, 1 << 60]),
        numbers,
        st.booleans(),
    )
    | st.builds(
        HeldRecord,
        numbers,
        numbers,
        st.integers(0, 3),
        st.sampled_from([b"", b"x" * 8, b"y" * 24]),
        st.sampled_from([1, 1 << 60]),
        ages,
    )
    | st.builds(ScaleRecord, st.sampled_from(["m", ""]), st.sampled_from([1e-9, 1e15]), st.sampled_from([1e-9, 1e15]))
    | st.builds(
        SessionEntry,
        numbers,
        st.booleans(),
        st.lists(st.tuples(numbers, numbers, ages), min_size=1, max_size=4).map(tuple),
        st.none() | st.just((0.0, 1e18)),
    )
    | st.builds(PromiseEntry, numbers, numbers, st.integers(1, 3), ages, ages)
    | st.builds(ObjectEntry, numbers, numbers, st.just("m"), ages)
    | st.builds(GeneralRecord, st.sampled_from([1e-9, 1e15]), st.just((0.0, 1.0)), st.none() | st.just((1e15, 1e-9, 1e-9))),
    max_size=30,
)


@given(nonsense)
def test_nonsense_breaks_nothing(records: list[Record]) -> None:
    router = router_of()
    restorer = Restorer(router, 1000.0, 1000.0)
    with contextlib.suppress(RecordError):
        restorer.add(decode(encode(records)))
    for _ in restorer.steps(never):
        pass
    router.check()
    serve(router, Prompt(keys_of(b"abc"), 300, 100, "m", session_key=7), 1001.0, cached=10)
    router.check()


@given(st.binary(max_size=200))
def test_bytes_that_are_no_records(data: bytes) -> None:
    try:
        records = decode(data)
    except RecordError:
        return
    assert decode(encode(records)) == records


def bomb(records: int) -> list[Record]:
    """Each prefix is as long as the first one, and takes thirty bytes."""
    long = os.urandom(MAX_BLOCKS * KEY_BYTES)
    last = (struct.pack("<Q", number) for number in range(records))
    more = [HeldRecord(0, 1, MAX_BLOCKS - 1, key, 64, 1.0) for key in last]
    return [LearnedRecord("r1", None, 0.0, 0.0, None, 0, False), HeldRecord(0, 0, 0, long, 64, 1.0), *more]


def test_a_short_snapshot_of_long_prefixes_is_taken_in_by_small_steps_and_to_a_bound() -> None:
    router = router_of(memory_bytes=1 << 28)
    restorer = Restorer(router, 100.0, 100.0, most_bytes=20 * MAX_BLOCKS * KEY_BYTES)
    restorer.add(bomb(50))
    taken = [restorer.blocks for _ in restorer.steps(never)]
    steps = [after - before for before, after in itertools.pairwise([*taken, restorer.blocks])]
    assert restorer.blocks == 19 * MAX_BLOCKS, "of the others, which were used least recently, nothing is"
    assert max(steps) == MAX_BLOCKS, "one at a time"
