"""The load generator reads an answer alike, however its bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure.answer import DONE, WORD, Answer, BadAnswer

EVENT = b'data: {"content":"' + WORD + b'"}\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(data)) for place in at), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges) if begin < end]


def fed(pieces: list[bytes]) -> tuple[Answer, list[bool]]:
    answer = Answer()
    return answer, [answer.feed(piece) for piece in pieces]


@given(words=st.integers(1, 12), framed=st.lists(st.integers(0, 400)), cuts=st.lists(st.integers(0, 700)))
def test_a_stream_in_any_chunks_and_pieces(words: int, framed: list[int], cuts: list[int]) -> None:
    body = EVENT * words + DONE + b"\n\n"
    wire = CHUNKED + b"".join(map(chunk, cut(body, framed))) + b"0\r\n\r\n"
    answer, complete = fed(cut(wire, cuts))
    assert complete == [False] * (len(complete) - 1) + [True]
    assert (answer.status, answer.words, answer.done) == (200, words, True)


@given(words=st.integers(0, 12), cuts=st.lists(st.integers(0, 200)))
def test_an_answer_with_a_length_in_any_pieces(words: int, cuts: list[int]) -> None:
    wire = b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % (len(WORD) * words) + WORD * words
    answer, complete = fed(cut(wire, cuts))
    # With no body at all, a cut can only be in the head.
    assert complete[-1]
    assert not any(complete[:-1])
    assert (answer.status, answer.words, answer.done) == (503, words, False)


def test_a_chunk_may_have_an_extension_and_trailers_may_follow() -> None:
    answer, complete = fed([CHUNKED + b"5;a=b\r\n word\r\n0\r\nX-A: 1\r\n\r\n"])
    assert complete == [True]
    assert answer.words == 1


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"1\r\nx\r\n0\r\n\r\nmore",
    ],
)
def test_what_is_no_answer_is_an_error(wire: bytes) -> None:
    with pytest.raises(BadAnswer):
        fed([wire])
