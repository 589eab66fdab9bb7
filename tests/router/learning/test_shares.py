"""Replicas with several caches of which none can be chosen: the belief settles at the share that is true."""

from __future__ import annotations

import random

import pytest

from router import Outcome, Replica, Router
from router.index.blocks import text_keys
from router.learning.shares import LEAST, MAX_CLIENTS, CacheShare, CacheShares
from router.types import Prompt

TTL_S = 10_000.0
BLOCK = 256
TOKENS = 100  # of a block
UNITS_PER_TOKEN = BLOCK / TOKENS


def router() -> Router:
    return Router(policy="cost", ttl_s=TTL_S, memory_bytes=1 << 26, chance=random.Random(1))


class Engine:
    """R caches behind one name, of which each request gets the next one in turn or by chance."""

    def __init__(self, caches: int, chance: random.Random) -> None:
        self._caches = [dict[bytes, None]() for _ in range(caches)]
        self._chance = chance

    def serve(self, keys: bytes) -> int:
        """Cached blocks of the prompt."""
        cache = self._chance.choice(self._caches)
        blocks = [keys[at : at + 8] for at in range(0, len(keys), 8)]
        held = next((number for number, block in enumerate(blocks) if block not in cache), len(blocks))
        cache.update(dict.fromkeys(blocks))
        return held


def converse(routed: Router, engine: Engine, conversations: int, turns: int, clients: int = 3) -> tuple[int, int, int]:
    """(tokens predicted, tokens found) in the second half of the turns, and the inferred losses of the cache."""
    losses, predicted, found, now = 0, 0, 0, 1.0
    for turn in range(1, turns + 1):
        for number in range(conversations):
            text = b"".join(b"conversation %d, turn %d. " % (number, each) * 50 for each in range(turn))
            keys = text_keys(text, BLOCK, 0)
            now += 1.0
            prompt = Prompt(keys, len(text), BLOCK, "m", client=number % clients)
            booking = routed.choose(prompt, ["r"], now)
            tokens = len(text) * TOKENS // BLOCK
            cached = engine.serve(keys) * TOKENS
            booking.first_token(now + 0.1)
            if turn > turns // 2:
                predicted += booking.chosen.matched_tokens
                found += min(cached, tokens)
            losses += booking.close(Outcome(True, tokens, min(cached, tokens)), now + 0.2)
            routed.check()
    return predicted, found, losses


@pytest.mark.parametrize("caches", [2, 4, 8])
def test_with_a_known_number_of_caches_the_prediction_is_what_is_found(caches: int) -> None:
    routed = router()
    routed.add(Replica("r", caches=caches))
    predicted, found, losses = converse(routed, Engine(caches, random.Random(2)), 12, 16)
    assert losses == 0
    assert 0.7 < predicted / found < 1.4


@pytest.mark.parametrize("caches", [4, 8])
def test_hidden_caches_are_found_by_losses_that_were_none(caches: int) -> None:
    routed = router()
    routed.add(Replica("r", 10_000_000))
    predicted, found, losses = converse(routed, Engine(caches, random.Random(3)), 12, 24)
    assert 1 < losses < 6, "it ends"
    assert 0.6 < predicted / found < 1.5


def test_a_replica_with_one_cache_has_no_share() -> None:
    routed = router()
    routed.add(Replica("r", 10_000_000))
    predicted, found, losses = converse(routed, Engine(1, random.Random(4)), 12, 12)
    assert losses == 0
    assert 0.9 < predicted / found < 1.1
    assert not routed._shares


def test_a_replica_that_loses_its_cache_thrice_has_no_share() -> None:
    """Its losses are real: nothing contradicts them."""
    routed, chance = router(), random.Random(5)
    routed.add(Replica("r", 10_000_000))
    for _ in range(3):
        converse(routed, Engine(1, chance), 12, 6)
    assert not routed._shares


def test_the_share_stays_within_what_is_possible_and_no_single_client_moves_it() -> None:
    share = CacheShare(4)
    for client in range(5):
        for _ in range(200):
            share.learn(client, 1000.0, 600.0)
    assert share.value == pytest.approx(0.6, rel=0.05)
    for _ in range(1000):
        share.learn(99, 1000.0, 0.0)
    assert share.value == pytest.approx(0.6, rel=0.05)
    for client in range(10_000):
        share.learn(client, 1e9, -5.0)
    assert share.value == 1 / 4
    assert len(share._clients) <= MAX_CLIENTS
    hidden = CacheShare()
    for client in range(20):
        hidden.learn(client, 1e12, 0.0)
    assert hidden.value == LEAST


def test_hidden_caches_that_are_none_are_given_up_and_known_ones_change() -> None:
    shares = CacheShares()
    shares.contradicted("r")
    shares.contradicted("r")
    assert shares.believed({"r": 10, "s": 10}) == {"r": 5, "s": 10}
    for client in range(3):
        for _ in range(500):
            if shares.get("r") is not None:
                shares.learn("r", client, 10_000.0, 10_000.0)
    assert not shares
    shares.set("r", 4)
    assert shares.believed({"r": 10}) == {"r": 2}
    shares.set("r", 8)
    assert shares.believed({"r": 10}) == {"r": 1}
    shares.set("r", 1)
    assert shares.believed({"r": 10}) == {"r": 10}
