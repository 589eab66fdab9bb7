"""Acknowledged heads: bounded, and forgotten at their expiry."""

from __future__ import annotations

from gateway.features.prompt_log.delta.acknowledged import MOST, AcknowledgedHeads


def test_a_flood_leaves_the_most_recently_used() -> None:
    heads = AcknowledgedHeads()
    heads.add(b"old", 10.0)
    for number in range(MOST - 1):
        heads.add(b"%d" % number, 10.0)
    assert heads.has(b"old", 1.0), "it was used last"
    for number in range(MOST - 1):
        heads.add(b"new %d" % number, 10.0)
    assert len(heads) == MOST
    assert heads.has(b"old", 1.0)
    assert not heads.has(b"0", 1.0)


def test_an_expired_head_is_not_used() -> None:
    heads = AcknowledgedHeads()
    heads.add(b"one", 10.0)
    assert heads.has(b"one", 9.9)
    assert not heads.has(b"one", 10.0)
    assert len(heads) == 0
    heads.add(b"one", 10.0)
    heads.add(b"one", 20.0)
    heads.forget(b"other")
    assert heads.has(b"one", 15.0)
    heads.forget(b"one")
    assert not heads.has(b"one", 15.0)
