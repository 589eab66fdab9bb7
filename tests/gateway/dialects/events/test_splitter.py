"""Streams cut into events, against any cutting into chunks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.events.splitter import Splitter
from gateway.dialects.events.sse import events_of

PIECES = st.lists(st.sampled_from([b"data: {}", b"event: a\r\n", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n", b"x"]), max_size=20)


@given(PIECES, st.lists(st.integers(0, 60)))
def test_any_cutting_gives_the_same_events(pieces: list[bytes], cuts: list[int]) -> None:
    data, splitter, found = b"".join(pieces), Splitter(), list[bytes]()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(bounds):
        found += splitter.feed(data[start:end])
    held, rest = splitter.held, splitter.finish()
    assert (held, splitter.held) == (len(rest), 0)
    assert found + [rest] * bool(rest) == list(events_of(data))


def test_what_is_dropped_is_held_no_more() -> None:
    splitter = Splitter()
    assert splitter.feed(b"data: {}\n\ndata: half") == [b"data: {}\n\n"]
    assert splitter.held == 10
    splitter.drop()
    assert (splitter.held, splitter.feed(b"data: 1\n\n")) == (0, [b"data: 1\n\n"])
