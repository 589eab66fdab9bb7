"""The traffic of the routing benchmark: the same prompts for all, and requests that come home."""

from __future__ import annotations

import itertools
import random

from bench.router.contestants import BLOCK_BYTES, BlockDicts, Warmroute
from bench.router.traffic import HEADS, Fleet, Prompts, Timed, fill

NAMES = ["r1", "r2"]


def test_the_same_seed_gives_the_same_prompts() -> None:
    one, other = (itertools.islice(Prompts(5).filling(), 80) for _ in range(2))
    assert list(one) == list(other)


def test_conversations_share_heads_and_have_two_turns() -> None:
    texts = list(itertools.islice(Prompts(5).filling(), 400))
    assert len({text[:500] for text in texts}) == HEADS
    second = [text for text in texts if any(text != other and text.startswith(other) for other in texts)]
    assert len(second) > 100


def test_every_request_comes_home_and_is_timed_once() -> None:
    contestant = Warmroute(NAMES, random.Random(0))
    contestant.grow(1_000)
    fleet, prompts, timed = Fleet(contestant, 2, 0), Prompts(0), Timed()
    texts = [prompts.conversation(3_000) for _ in range(20)]
    for text in texts * 2:
        fleet.send(text, timed)
    assert contestant.router.ledger.open_leases > 0, "some are in flight, as in life"
    fleet.drain()
    assert contestant.router.ledger.open_leases == 0
    assert len(timed.us) == 40
    assert all(us > 0 for us in timed.us)
    assert 0.3 < timed.held < 0.8
    contestant.router.check()


def test_an_index_is_filled_to_its_capacity() -> None:
    contestant = BlockDicts(NAMES, random.Random(0))
    fill(Fleet(contestant, 2, 0), Prompts(0), 2_000)
    assert 0.97 * 2_000 <= contestant.blocks <= 2_000
    contestant.choose(bytes(200 * BLOCK_BYTES), 0.0)
    assert contestant.blocks <= 2_000
