"""The reader of streams that get a name: any cutting gives the same bytes, and complete events are not held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.table import DIALECTS
from gateway.features.prompt_log.log_reader import LogReader
from tests.gateway.request.test_dialects import BEGUN, COMPLETED, CREATED, DELTA, ENDS, SAYS
from tests.support.fakes import DONE, event

NAME = b"data: {}\n\n"
FIRST = event("he") + event("data: [DONE]") + event("message_stop")
STREAMS = {
    "/v1/chat/completions": (FIRST, event("llo", "stop"), DONE),
    "/v1/messages": (BEGUN + SAYS, ENDS[: ENDS.index(b"event: message_stop")], ENDS[ENDS.index(b"event: message_stop") :]),
    "/v1/responses": (CREATED, DELTA, COMPLETED),
}


def reader_of(path: str, last: bytes) -> LogReader:
    api = ApiRequest("m", None, "", stream=True, metered=True, body=b"")
    inner = DIALECTS[path].reader(api, watchful=False)
    return LogReader(inner, lambda each: each.strip() == last.strip(), lambda each: NAME + each)


@pytest.mark.parametrize("path", STREAMS)
@given(cuts=st.lists(st.integers(0, 2000), max_size=8), ended=st.booleans())
def test_any_cutting_gives_the_same_bytes(path: str, cuts: list[int], ended: bool) -> None:
    first, middle, last = STREAMS[path]
    data = first + middle + (last if ended else last.rstrip(b"\n"))  # some engines leave the blank line out
    reader, out, at = reader_of(path, last), b"", 0
    for cut in [*sorted(cuts), len(data)]:
        out += reader.feed(data[at:cut])
        at = max(at, cut)
    out += reader.finish()
    assert out == first + middle + NAME + data[len(first + middle) :]
    assert (reader.done, reader.within_event, reader.holds) == (True, False, False)


@pytest.mark.parametrize("path", STREAMS)
def test_complete_events_are_not_held(path: str) -> None:
    first, middle, last = STREAMS[path]
    reader = reader_of(path, last)
    assert reader.feed(first) == first
    assert reader.feed(middle + last[:9]) == middle
    assert reader.feed(last[9:] + b": more\n\n") == NAME + last + b": more\n\n"


def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    reader, sent, passed = reader_of("/v1/responses", b"none"), 0, 0
    for _ in range(100):
        piece = b"data: response.completed" + b"x" * 100_000
        sent += len(piece)
        passed += len(reader.feed(piece))
    assert passed > sent - (5 << 20)
    assert reader.within_event
