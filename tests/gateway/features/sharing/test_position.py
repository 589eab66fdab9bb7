"""Where a gateway reads in the stream."""

from __future__ import annotations

import pytest

from gateway.features.sharing.position import (
    BACKLOG_S,
    BEGINNING,
    FUTURE_S,
    MAX_ENTRIES_PER_READ,
    READ_DIVISOR,
    Position,
    order_of,
)
from gateway.features.sharing.server.client import InvalidReplyError

SERVER_S = 1_000_000.0


def attached(last: bytes = BEGINNING) -> Position:
    position = Position()
    position.attach(last, SERVER_S, 50.0)
    return position


def test_a_new_gateway_reads_the_last_seconds() -> None:
    assert attached(b"5-0").id == b"%d-0" % ((SERVER_S - BACKLOG_S) * 1000)


def test_it_goes_on_where_it_was_unless_it_is_another_stream() -> None:
    position = attached()
    assert position.note_read(b"999999000-3") == 999_999.0
    position.attach(b"999999000-7", SERVER_S + 1, 51.0)
    assert position.id == b"999999000-3"
    position.attach(b"999998000-0", SERVER_S, 52.0)
    assert position.id == b"999998000-0", "flushed, or of a server whose clock is behind"
    assert position.note_written(b"999997000-0", 53.0)
    assert position.id == BEGINNING, "begun anew while it was attached"


def test_a_stream_with_an_id_of_the_future_cannot_go_on() -> None:
    """All further ids follow it: nothing would ever become old."""
    position = attached()
    at_most = int((SERVER_S + 10 + FUTURE_S) * 1000)
    assert position.note_written(b"%d-0" % at_most, 60.0)
    assert not position.note_written(b"%d-0" % (at_most + 1), 60.0)


def test_what_never_comes_in_time_is_passed_over() -> None:
    position = attached()
    position.note_written(b"999999999-0", 50.0)
    sizes = []
    while position.id != b"999999999-0":
        sizes.append(position.max_entries)
        position.note_timeout()
    assert sizes == [MAX_ENTRIES_PER_READ, MAX_ENTRIES_PER_READ // READ_DIVISOR, 1]
    for _ in range(10):
        position.note_answer()
    assert position.max_entries == MAX_ENTRIES_PER_READ


@pytest.mark.parametrize("odd", [b"abc", b"1-x", b"", b"-", b"1-2-3"])
def test_odd_ids_change_nothing(odd: bytes) -> None:
    position = attached()
    position.note_read(b"999999000-3")
    for step in (
        lambda: position.note_read(odd),
        lambda: position.note_written(odd, 50.0),
        lambda: position.attach(odd, SERVER_S, 50.0),
    ):
        with pytest.raises(InvalidReplyError):
            step()
        assert position.id == b"999999000-3"
    assert order_of(b"7") == (7, 0)
