"""What waits for the store."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.messages import EventBatch, Reset
from gateway.features.sharing.messages import MAX_ENVELOPE_BYTES, MAX_ITEMS, Envelope, Item, encode_envelope
from gateway.features.sharing.outbox import Outbox


def published(size: int) -> Item:
    return (1, EventBatch(0.0, b"x" * size))


@given(st.lists(st.integers(0, 400_000), max_size=30))
def test_all_of_it_comes_out_once_in_its_order_in_envelopes_that_fit(sizes: list[int]) -> None:
    outbox = Outbox(lambda: 0.0, max_bytes=1 << 40)
    items = [published(size) for size in sizes]
    for item, size in zip(items, sizes, strict=True):
        outbox.add(item, size)
    taken: list[Item] = []
    while outbox:
        envelope = outbox.take()
        assert envelope
        assert len(encode_envelope(Envelope(1, 0.0, "h", envelope))) <= MAX_ENVELOPE_BYTES
        taken += envelope
    assert taken == items
    assert outbox.take() == ()


def test_an_envelope_has_a_bounded_number_of_items() -> None:
    outbox = Outbox(lambda: 0.0)
    for _ in range(MAX_ITEMS + 1):
        outbox.add((1, Reset()))
    assert [len(outbox.take()), len(outbox.take())] == [MAX_ITEMS, 1]


def test_what_is_too_much_is_dropped_with_all_that_follows_until_the_store_is_back() -> None:
    now = 10.0
    outbox = Outbox(lambda: now, max_bytes=1000)
    outbox.add(published(400), 400)
    now = 20.0
    outbox.add(published(400), 400)
    assert (len(outbox), outbox.lost_since) == (2, None)
    outbox.add(published(400), 400)
    outbox.add(published(1), 1)
    assert (len(outbox), outbox.dropped, outbox.lost_since) == (0, 4, 10.0)
    assert outbox.reopen() == 10.0
    assert outbox.reopen() is None
    outbox.add(published(1), 1)
    assert len(outbox) == 1


def test_while_the_store_takes_items_more_may_wait() -> None:
    """All that is open here, for one that has just begun."""
    outbox = Outbox(lambda: 0.0, max_bytes=1000)
    outbox.connected = True
    for _ in range(10):
        outbox.add((1, Reset()), 500)
    assert len(outbox) == 10
    outbox.connected = False
    outbox.add((1, Reset()), 500)
    assert (len(outbox), outbox.dropped) == (0, 11)
