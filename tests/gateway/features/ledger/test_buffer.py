"""The buffer of entries: bounded, in order, exact."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.features.ledger.buffer import ENTRY_BYTES, Buffer, Entry, size_of
from tests.gateway.features.ledger.conftest import Entries, record


@given(st.lists(st.one_of(st.tuples(st.just("add"), st.integers(1, 60)), st.tuples(st.just("take"), st.integers(0, 5)))))
def test_it_is_a_bounded_queue(steps: list[tuple[str, int]]) -> None:
    buffer, waiting, dropped = Buffer(100), list[Entry](), 0
    for step, number in steps:
        if step == "add":
            if sum(each[-1] for each in waiting) + number > 100:
                dropped += 1
            else:
                waiting.append((len(waiting), number))
            buffer.add((len(waiting) - 1, number) if waiting else (0, number))
        else:
            taken = buffer.take(number)
            assert taken == waiting[:number]
            assert buffer.bytes == sum(each[-1] for each in waiting), "what is taken counts"
            buffer.release(taken)
            del waiting[:number]
        buffer.check()
        assert (buffer.entries, buffer.dropped) == (len(waiting), dropped)


def test_a_flood_of_requests_with_long_names_stays_within_its_memory() -> None:
    entries = Entries(buffer_bytes=1 << 20)
    long = "\U0001f600" * 100_000
    buffer = entries.ledger.buffer
    for _ in range(2000):
        entries.observe(record(model=long, alias=long, error=long))
    buffer.check()
    assert buffer.dropped > 1000
    assert buffer.entries * ENTRY_BYTES < buffer.bytes <= 1 << 20
    (entry,) = buffer.take(1)
    assert max(len(text) for text in entry if isinstance(text, str)) == 200


def test_the_size_of_an_entry_grows_with_its_texts() -> None:
    assert size_of("a", "", "bc") == ENTRY_BYTES + 4 * 3
