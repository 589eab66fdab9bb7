"""Requests have their turns between the steps of a snapshot: no step is longer where the router knows more."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from router import Replica, Router
from router.snapshot.collect import SLICE, SLICE_BYTES, collect
from router.snapshot.records import MAX_PATH_BLOCKS, HeldRecord, Record
from router.snapshot.restore import Restorer
from router.types import KEY_BYTES
from tests.support.compiled import COMPILED
from tests.support.work import lines_of

pytestmark = pytest.mark.skipif(COMPILED, reason="lines of compiled code are not counted")

FLEET = [f"r{number}" for number in range(8)]
SIZES = 1000, 4000  # prompts; the larger one has as much again of all else
NOW = 1e6


def router_of(names: list[str], memory_bytes: int = 1 << 28) -> Router:
    router = Router(policy="cost", ttl_s=NOW, memory_bytes=memory_bytes, chance=random.Random(3))
    for name in names:
        router.add(Replica(name))
    return router


def used_router(size: int) -> Router:
    router, chance = router_of(FLEET), random.Random(size)
    for number in range(size):
        name = FLEET[number % len(FLEET)]
        router.trie.insert(name, chance.randbytes(10 * KEY_BYTES), float(number))
        router.sessions.answered(number + 1, name, 100, float(number))
        router.sessions.answered(number + 1, FLEET[-1], 100, float(number))
        router.objects.put(number, name, "m", float(number))
    return router


def records_of(router: Router) -> list[Record]:
    return [record for slice_ in collect(router, NOW) for record in slice_]


def nothing(_router: Router) -> None:
    pass


def all_is_lost(router: Router) -> None:
    for name in FLEET:
        router.restarted(name)


def all_is_used_again(router: Router) -> None:
    held = [record for record in records_of(router) if isinstance(record, HeldRecord)]
    for number, record in enumerate(held):
        router.trie.insert(FLEET[record.replica], record.keys, NOW / 2 + number)


@pytest.mark.parametrize("since_s", [float("inf"), 1.0])
def test_collecting(since_s: float) -> None:
    longest = [max(lines_of(collect(used_router(size), NOW, since_s))) for size in SIZES]
    assert longest[1] <= 1.2 * longest[0]


@pytest.mark.parametrize("meanwhile", [nothing, all_is_lost, all_is_used_again])
def test_collecting_while_the_index_changes(meanwhile: Callable[[Router], None]) -> None:
    longest = []
    for size in SIZES:
        router = used_router(size)
        half = 2 * size // SLICE + size // SLICE // 2  # behind all sessions and objects, and half of the prefixes

        def between(count: int, router: Router = router, half: int = half) -> None:
            if count == half:
                meanwhile(router)

        lines = lines_of(collect(router, NOW), between)
        assert len(lines) > half + 1
        longest.append(max(lines))
    assert longest[1] <= 1.2 * longest[0]


def test_restoring_and_replicas_that_join_late() -> None:
    longest = []
    for size in SIZES:
        records = records_of(used_router(size))
        router, lines = router_of(FLEET[:4]), list[int]()
        restorer = Restorer(router, NOW, NOW)
        for first in range(0, len(records), SLICE):
            restorer.add(records[first : first + SLICE])
        lines += lines_of(restorer.steps(lambda _: False))
        for name in FLEET[4:]:
            router.add(Replica(name))
            lines += lines_of(restorer.steps(lambda _: False))
        assert restorer.blocks == 10 * size
        assert len(router.sessions) == size
        longest.append(max(lines))
    assert longest[1] <= 1.2 * longest[0]


def test_giving_up() -> None:
    longest = []
    for size in SIZES:
        restorer = Restorer(router_of([]), NOW, NOW)
        restorer.add(records_of(used_router(size)))
        assert restorer.waiting == FLEET
        longest.append(max(lines_of(restorer.free())))
        assert restorer.waiting == []
    assert longest[1] <= 1.2 * longest[0]


# -- bytes


def keys_of_slices(router: Router) -> list[list[int]]:
    """Bytes of the keys of each prefix, for each slice that has any."""
    held = [[record for record in slice_ if isinstance(record, HeldRecord)] for slice_ in collect(router, NOW)]
    keys = [[len(record.keys) for record in records if record.keys] for records in held]
    return [each for each in keys if each]


def test_a_slice_of_long_prompts_is_short() -> None:
    router, chance = router_of(FLEET), random.Random(1)
    for number in range(40):
        router.trie.insert(FLEET[0], chance.randbytes(10_000 * KEY_BYTES), float(number))
    slices = keys_of_slices(router)
    assert sum(map(len, slices)) == 40
    assert all(sum(keys) <= SLICE_BYTES for keys in slices)
    assert max(map(len, slices)) == SLICE_BYTES // (10_000 * KEY_BYTES)


def test_a_prompt_that_is_longer_than_a_slice_is_alone_in_one() -> None:
    router, chance = router_of(FLEET), random.Random(1)
    for number in range(3):
        router.trie.insert(FLEET[0], chance.randbytes(MAX_PATH_BLOCKS * KEY_BYTES), float(number))
        router.trie.insert(FLEET[0], chance.randbytes(KEY_BYTES), float(number))
    long = [MAX_PATH_BLOCKS * KEY_BYTES]
    assert keys_of_slices(router) == [[KEY_BYTES], long, [KEY_BYTES], long, [KEY_BYTES], long]


def test_of_a_prompt_longer_than_any_record_its_beginning_is_written() -> None:
    router, chance = router_of(FLEET), random.Random(1)
    shared = chance.randbytes((MAX_PATH_BLOCKS + 10) * KEY_BYTES)
    for number in range(3):
        router.trie.insert(FLEET[0], shared + chance.randbytes(KEY_BYTES), float(number))
    copy = router_of(FLEET)
    restorer = Restorer(copy, NOW, NOW)
    restorer.add(records_of(router))
    for _ in restorer.steps(lambda _: False):
        pass
    assert copy.trie.match(shared, NOW) == {FLEET[0]: MAX_PATH_BLOCKS}
