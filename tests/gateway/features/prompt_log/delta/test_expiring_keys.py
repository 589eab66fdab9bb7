"""Keys that expire: bounded, and forgotten at their expiry."""

from __future__ import annotations

from gateway.features.prompt_log.delta.expiring_keys import ExpiringKeys

MOST = 100


def test_a_flood_leaves_the_most_recently_used() -> None:
    keys = ExpiringKeys(MOST)
    keys.add(b"old", 10.0)
    for number in range(MOST - 1):
        keys.add(b"%d" % number, 10.0)
    assert keys.has(b"old", 1.0), "it was used last"
    for number in range(MOST - 1):
        keys.add(b"new %d" % number, 10.0)
    assert len(keys) == MOST
    assert keys.has(b"old", 1.0)
    assert not keys.has(b"0", 1.0)


def test_an_expired_key_is_not_used() -> None:
    keys = ExpiringKeys(MOST)
    keys.add(b"one", 10.0)
    assert keys.has(b"one", 9.9)
    assert not keys.has(b"one", 10.0)
    assert len(keys) == 0
    keys.add(b"one", 10.0)
    keys.add(b"one", 20.0)
    keys.forget(b"other")
    assert keys.has(b"one", 15.0)
    keys.forget(b"one")
    assert not keys.has(b"one", 15.0)
