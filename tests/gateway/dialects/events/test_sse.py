"""Where events end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.events.sse import EVENT_END, data_of, end_of, ends_of

texts = st.text("a\r\n", max_size=30).map(str.encode) | st.text("a\n", max_size=30).map(str.encode)


@given(texts, st.integers(0, 40))
def test_events_end_where_the_expression_finds_their_ends(data: bytes, searched: int) -> None:
    expected = [match.end() for match in EVENT_END.finditer(data, searched)]
    assert ends_of(data, searched) == expected
    assert ends_of(bytearray(data), searched) == expected
    assert end_of(data, searched) == end_of(bytearray(data), searched) == next(iter(expected), -1)


@given(
    st.sampled_from([b"data: ", b"event: a\ndata: ", b"event: ", b"id: 1\ndata: "]),
    st.text("a:\r\n", max_size=30).map(str.encode),
)
def test_the_data_of_usual_events_is_read_as_that_of_others(begin: bytes, rest: bytes) -> None:
    event = begin + rest
    lines = [line.removeprefix(b"data:").strip() for line in event.splitlines() if line.startswith(b"data:")]
    assert data_of(event).strip() == b"\n".join(lines).strip()
