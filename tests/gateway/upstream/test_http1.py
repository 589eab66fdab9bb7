"""A replica's answer as bytes: any cutting gives the same, a second and simpler reader agrees, what is ambiguous is refused."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.upstream.http1 import MAX_CHUNK_LINE, MAX_HEAD_BYTES, AnswerParser, FramingError, lines, parse_head, split_length
from scripts.fuzzing.answers import TOKENS, Outcome, Refused, check, invent, read, simply

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def bytewise(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


def good(data: bytes, **options: bool) -> Outcome:
    outcome = read([data], **options)
    assert isinstance(outcome, Outcome), outcome
    assert read(bytewise(data), **options) == outcome
    return outcome


def body_of(data: bytes, **options: bool) -> tuple[int, bytes, bytes, bool]:
    outcome = good(data, **options)
    return outcome.status, outcome.body, outcome.rest, outcome.early


# -- what is understood


@pytest.mark.parametrize("name", [b"Content-Length", b"content-length"])
@pytest.mark.parametrize("before", [b"", b"A: b\r\n"])
@pytest.mark.parametrize("after", [b"", b"C: d\r\n"])
def test_heads_that_differ_only_in_their_length_are_one_head(name: bytes, before: bytes, after: bytes) -> None:
    head = OK + before + name + b": 104\r\n" + after + b"\r\n"
    assert split_length(head) == (OK + before + after + b"\r\n", 104)


@pytest.mark.parametrize(
    "line",
    [b"", b"Content-length: 1\r\n", b"Content-Length:1\r\n", b"X-Content-Length: 1\r\n", b"X: Content-Length: 1\r\n"]
    + [b"Content-Length: %b\r\n" % value for value in (b"", b"+1", b"1 ", b"1, 1", b"0x1", b"\xd9\xa1", b"1" * 13)],
)
def test_unusual_lengths_stay_in_the_head(line: bytes) -> None:
    head = OK + line + b"\r\n"
    assert split_length(head) == (head, -1)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", (200, b"hello", b"", True)),
        (OK + b"Content-Length: 5\r\n\r\nhelloHTTP/1.1 200", (200, b"hello", b"HTTP/1.1 200", True)),
        (OK + b"Content-Length: 0\r\n\r\n", (200, b"", b"", True)),
        (OK + b"Content-Length:  007  \r\n\r\nhello42x", (200, b"hello42", b"x", True)),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", (200, b"", b"", True)),
        (b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", (200, b"", b"", True)),
        (b"HTTP/1.1 599 \xe9\t\r\nContent-Length: 0\r\n\r\n", (599, b"", b"", True)),
        (OK + b"\r\n", (200, b"", b"", False)),
        (OK + b"X:\r\n\r\nuntil the end\r\n\r\n", (200, b"until the end\r\n\r\n", b"", False)),
        (b"HTTP/1.0 200 OK\r\n\r\nold", (200, b"old", b"", False)),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold", (200, b"old", b"", True)),
        (CHUNKED + b"0\r\n\r\n", (200, b"", b"", True)),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\nrest", (200, b"hello", b"rest", True)),
        (CHUNKED + b'A \t;x="y";\xff\r\n0123456789\r\n00;z\r\nT: 1\r\nU:\r\n\r\n!', (200, b"0123456789", b"!", True)),
        (CHUNKED + b"2\r\n\r\n\r\n2\r\n0\r\r\n0\r\n\r\n", (200, b"\r\n0\r", b"", True)),
        (OK + b"TRANSFER-encoding: CHUNKED\r\n\r\n1\r\nx\r\n0\r\n\r\n", (200, b"x", b"", True)),
        (b"HTTP/1.1 204 No\r\n\r\nbody", (204, b"", b"body", True)),
        (b"HTTP/1.1 204 No\r\nContent-Length: 4\r\n\r\nbody", (204, b"", b"body", True)),
        (b"HTTP/1.1 304 No\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (304, b"", b"0\r\n\r\n", True)),
        (b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 103 E\r\nLink: x\r\n\r\n" + OK + b"\r\nx", (200, b"x", b"", False)),
        (b"HTTP/1.1 102 P\r\nContent-Length: 9\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\nx", (200, b"x", b"", True)),
    ],
)
def test_every_kind_of_framing(data: bytes, expected: tuple[int, bytes, bytes, bool]) -> None:
    assert body_of(data) == expected


@pytest.mark.parametrize("framing", [b"", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_the_answer_to_a_head_has_no_body(framing: bytes) -> None:
    assert body_of(OK + framing + b"\r\nhello", to_head=True) == (200, b"", b"hello", True)


def test_headers_are_kept_in_order_and_without_the_space_around_them() -> None:
    head = parse_head(OK + b"B: 1\r\na:  x \xe9  y \r\nB:\r\nSet-Cookie: a:b\r\n\r\n")
    assert head.headers == [(b"b", b"1"), (b"a", b"x \xe9  y"), (b"b", b""), (b"set-cookie", b"a:b")]
    assert (head.get(b"b"), head.get(b"none"), head.reason, head.length, head.chunked) == (b"1", b"", b"OK", None, False)
    assert lines(head.headers[:2]) == b"b: 1\r\na: x \xe9  y\r\n"


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (OK + b"Content-Length: 1\r\n\r\n", True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", True),
        (OK + b"\r\n", False),
        (OK + b"Content-Length: 1\r\nConnection: X, Close\r\n\r\n", False),
        (OK + b"Content-Length: 1\r\nConnection: closed\r\nConnection: keep-alive\r\n\r\n", True),
        (OK + b"Content-Length: 1\r\nConnection: keep-alive\r\nConnection: close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: Keep-Alive\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive, close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n", False),
        (b"HTTP/1.1 204 No\r\n\r\n", True),
    ],
)
def test_which_connections_may_be_used_again(head: bytes, kept: bool) -> None:
    assert parse_head(head).keep_alive is kept


# -- what is refused

AMBIGUOUS = [
    OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 204 No\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    *[
        OK + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n"
        for coding in (
            b"",
            b"gzip",
            b"identity",
            b"gzip, chunked",
            b"chunked, chunked",
            b"chunked;q=1",
            b"chunked\t",
            b"\tchunked",
            b'"chunked"',
            b"chunke",
        )
    ],
    *[
        OK + b"Content-Length: " + length + b"\r\n\r\nhello"
        for length in (
            b"",
            b"+5",
            b"-5",
            b"0x5",
            b"5_0",
            b"5.0",
            b"5e0",
            b"5, 5",
            b"5 5",
            b"5;",
            b"5\t",
            b"\xd9\xa5",
            b"\xc2\xb2",
        )
    ],
    OK + b"Content-Length: 1000000000000000\r\n\r\nhello",
    OK + b"X: a\r\n folded\r\n\r\n",
    OK + b"X: a\r\n\tContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
    OK + b"X: a\rContent-Length: 5\r\n\r\nhello",
    OK + b"X: a\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
    b"HTTP/1.1 200 O\rK\r\n\r\n",
    OK + b"X: a\x00b\r\n\r\n",
    OK + b"X: a\x7fb\r\n\r\n",
    OK + b"X\x00: b\r\n\r\n",
    OK + b"Content-Length : 5\r\n\r\nhello",
    OK + b"X y: 5\r\n\r\n",
    OK + b": 5\r\n\r\n",
    OK + b"no colon\r\n\r\n",
    OK + b"\xc3\xa9: x\r\n\r\n",
    b"\r\n" + OK + b"\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n"[:-1],
    b"HTTP/1.1 200 OK",
    b"",
    b"H",
    b"ICY 200 OK\r\n\r\n",
    b"HTTP/2 200\r\n\r\n",
    b"HTTP/1.10 200 OK\r\n\r\n",
    b"HTTP/1.1 20 OK\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"HTTP/1.1 099 OK\r\n\r\n",
    b"HTTP/1.1 +20 OK\r\n\r\n",
    b"HTTP/1.1\t200 OK\r\n\r\n",
    b"HTTP/1.1 200OK\r\n\r\n",
    b"HTTP/1.1 101 S\r\nUpgrade: x\r\n\r\n" + OK + b"\r\n",
    b"HTTP/1.1 100 C\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n" + OK + b"\r\n",
    b"HTTP/1.1 100 C\r\n\r\n",
    OK + b"Content-Length: 5\r\n\r\nhell",
    *[
        CHUNKED + chunks
        for chunks in (
            b"",
            b"5",
            b"5\r\nhel",
            b"5\r\nhello",
            b"5\r\nhello\r\n",
            b"5\r\nhello\r\n0\r\n",
            b"5\r\nhello\r\n0\r\n\r",
            b"5\r\nhello\r\n0\r\nT: 1\r\n",
            b"5\r\nhello!\r\n0\r\n\r\n",
            b"5\r\nhello\rx0\r\n\r\n",
            b"5\r\nhello0\r\n\r\n",
            b"5\nhello\r\n0\r\n\r\n",
            b"5\r\nhello\n0\r\n\r\n",
            b"\r\n0\r\n\r\n",
            b" 5\r\nhello\r\n0\r\n\r\n",
            b"+5\r\nhello\r\n0\r\n\r\n",
            b"-5\r\nhello\r\n0\r\n\r\n",
            b"0x5\r\nhello\r\n0\r\n\r\n",
            b"5_\r\nhello\r\n0\r\n\r\n",
            b"5 5\r\nhello\r\n0\r\n\r\n",
            b"5;\x00\r\nhello\r\n0\r\n\r\n",
            b"5;a\rb\r\nhello\r\n0\r\n\r\n",
            b"5;a\nb\r\nhello\r\n0\r\n\r\n",
            b"\xd9\xa5\r\nhello\r\n0\r\n\r\n",
            b"1000000000000000\r\nx",
            b"0000000000000000\r\n\r\n",
            b"0\r\n folded: x\r\n\r\n",
            b"0\r\nT : x\r\n\r\n",
            b"0\r\nno colon\r\n\r\n",
            b"0\r\nT: x\nU: y\r\n\r\n",
            b"0\r\n\n\r\n\r\n",
        )
    ],
]


@pytest.mark.parametrize("data", AMBIGUOUS, ids=range(len(AMBIGUOUS)))
def test_what_is_ambiguous_or_broken_is_refused(data: bytes) -> None:
    assert isinstance(read([data]), Refused)
    assert isinstance(read(bytewise(data)), Refused)
    assert simply(data) is None


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes, more: bytes) -> None:
    """`read` lets every exception but FramingError escape; and what is refused whole is refused in pieces."""
    for pieces in ([data, more], [CHUNKED + data, more], [OK + data, more + b"\r\n\r\n"]):
        assert isinstance(read(pieces), Refused) == isinstance(read([b"".join(pieces)]), Refused)


# -- any cutting, and the simple reader

fragments = st.lists(st.sampled_from(TOKENS) | st.binary(max_size=4), max_size=6).map(b"".join)
starts = st.sampled_from(
    [b"", OK, CHUNKED, OK + b"Content-Length: 5\r\n", b"HTTP/1.1 100 C\r\n\r\n" + OK, b"HTTP/1.0 200 OK\r\n"]
)
seeds = st.integers(0, 1 << 32)


@settings(max_examples=400)
@given(starts, fragments, seeds)
@example(OK, b"Content-Length: 5\r\n\r\nhello\r", 0)
def test_any_cutting_gives_the_same_and_the_simple_reader_agrees(start: bytes, more: bytes, seed: int) -> None:
    check(start + more, Random(seed))


@settings(max_examples=300)
@given(seeds)
def test_the_same_for_whole_invented_answers(seed: int) -> None:
    check(invent(Random(seed)), Random(seed))


pieces = st.lists(st.binary(min_size=1, max_size=40), max_size=6)
extensions = st.sampled_from([b"", b" ", b";a", b"; a=b", b'\t;x="0"', b";" + b"e" * 50])


@given(pieces, extensions, st.sampled_from([b"", b"T: 1\r\n", b"T:\r\nU: 0\r\n"]), st.binary(max_size=9), seeds)
def test_every_body_in_chunks_comes_out_as_it_went_in(
    chunks: list[bytes], extension: bytes, trailers: bytes, rest: bytes, seed: int
) -> None:
    coded = b"".join(b"%X%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    data = CHUNKED + coded + b"0\r\n" + trailers + b"\r\n" + rest
    assert body_of(data) == (200, b"".join(chunks), rest, True)
    check(data, Random(seed))


@given(st.binary(max_size=100), st.binary(max_size=9))
def test_a_length_cuts_exactly_there(body: bytes, rest: bytes) -> None:
    data = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body + rest
    assert body_of(data) == (200, body, rest, True)


@given(st.binary(max_size=100))
def test_what_was_given_out_before_an_error_is_of_the_body(more: bytes) -> None:
    """However it is cut, no byte of the framing comes out as body."""
    answer, body = AnswerParser(), b""
    for byte in bytewise(CHUNKED + b"5\r\nhello"):
        body += answer.feed(byte)
    with pytest.raises(FramingError):
        answer.feed(b"!" + more)
    assert body == b"hello"


# -- limits, exactly, for any cutting


def ways(data: bytes) -> list[list[bytes]]:
    """Whole, with the last bytes one by one, and in large pieces: what is costly is fed in few calls."""
    half = len(data) // 2
    return [[data], [data[:half], data[half:]], [data[:-9], *bytewise(data[-9:])]]


@pytest.mark.parametrize(("more", "fits"), [(-3, True), (-2, True), (-1, True), (0, True), (1, False), (2, False), (3, False)])
@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 100 C\r\n\r\n", b"HTTP/1.1 103 C\r\nLink: x\r\n\r\n" * 9])
def test_a_head_has_a_longest_length(more: int, fits: bool, before: bytes) -> None:
    start = OK + b"Content-Length: 0\r\nX: "
    data = before + start + b"x" * (MAX_HEAD_BYTES - len(before) - len(start) + more) + b"\r\n\r\n"
    for way in ways(data):
        assert isinstance(read(way), Outcome) is fits, (more, [len(piece) for piece in way][:5])


@pytest.mark.parametrize(("more", "fits"), [(-3, True), (-2, True), (-1, True), (0, True), (1, False), (2, False), (3, False)])
def test_trailers_have_a_longest_length(more: int, fits: bool) -> None:
    trailers = b"X: " + b"x" * (MAX_HEAD_BYTES - 5 + more) + b"\r\n\r\n"
    for way in ways(CHUNKED + b"0\r\n" + trailers):
        assert isinstance(read(way), Outcome) is fits


@pytest.mark.parametrize(("more", "fits"), [(-1, True), (0, True), (1, False), (2, False)])
def test_the_line_of_a_chunk_has_a_longest_length(more: int, fits: bool) -> None:
    line = b"1;" + b"x" * (MAX_CHUNK_LINE - 4 + more) + b"\r\n"
    data = CHUNKED + b"1\r\nx\r\n" + line + b"x\r\n0\r\n\r\n"
    for way in [*ways(data), bytewise(data)]:
        assert isinstance(read(way), Outcome) is fits


ENDLESS = {
    "head": (OK + b"X: ", b"x" * 1000),
    "headers": (OK, b"X: x\r\n" * 200),
    "reason": (b"HTTP/1.1 200 ", b"x" * 1000),
    "interim answers": (b"", b"HTTP/1.1 100 C\r\n\r\n" * 50),
    "extension": (CHUNKED + b"1;", b"x" * 1000),
    "zeros": (CHUNKED, b"0" * 1000),
    "trailer": (CHUNKED + b"0\r\nX: ", b"x" * 1000),
    "trailers": (CHUNKED + b"0\r\n", b"X: x\r\n" * 200),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_is_given_up_and_little_is_kept_until_then(name: str) -> None:
    start, more = ENDLESS[name]
    answer = AnswerParser()
    answer.feed(start)
    for _ in range((MAX_HEAD_BYTES + 3) // len(more) + 1):
        assert len(answer._buffer) <= MAX_HEAD_BYTES + 3
        try:
            answer.feed(more)
        except FramingError:
            return
    pytest.fail("it was never given up")


# -- linear work


@pytest.mark.parametrize(
    ("start", "piece", "most"),
    [
        (CHUNKED + b"100000\r\n", b"x", 2),  # a long chunk
        (CHUNKED, b"1\r\nx\r\n", 8),  # many short ones
        (OK + b"\r\n", b"x", 2),
        (OK + b"Content-Length: 100000\r\n\r\n", b"x", 2),
    ],
)
def test_a_body_byte_by_byte_is_linear_work(start: bytes, piece: bytes, most: int) -> None:
    """What a step may look at: the bytes that it is given, and what is kept of earlier ones."""
    answer, touched = AnswerParser(), 0
    answer.feed(start)
    for byte in bytewise(piece * 20_000):
        touched += len(answer._buffer) + 1
        answer.feed(byte)
    assert touched <= most * 20_000 * len(piece)


def test_many_chunks_in_one_read_are_linear_work() -> None:
    """Nothing is recursive either: a million chunks do not reach a limit of depth."""
    data = CHUNKED + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n"
    assert len(good_once(data).body) == 200_000
    half = data[: len(data) // 2 - 3]
    assert good_once(half, data[len(half) :]).body == b"x" * 200_000


def good_once(*parts: bytes) -> Outcome:
    outcome = read(list(parts))
    assert isinstance(outcome, Outcome)
    return outcome


@pytest.mark.parametrize("value", [b" " * 60_000 + b"x", b"x" + b" " * 60_000 + b"x", b"\t " * 30_000, b":" * 60_000])
@pytest.mark.timeout(10)
def test_a_header_full_of_space_does_not_block(value: bytes) -> None:
    """What strips the space must not try every place in it: that took three seconds."""
    for _ in range(50):
        assert parse_head(OK + b"X: " + value + b"\r\n\r\n").headers == [(b"x", value.strip(b" "))]


def test_its_state_can_be_read() -> None:
    answer = AnswerParser()
    assert repr(answer) == "<Answer without head, head, 0 bytes left>"
    answer.feed(OK + b"Content-Length: 5\r\n\r\nhe")
    assert repr(answer) == "<Answer 200, length, 3 bytes left>"
    answer.feed(b"llo")
    assert repr(answer) == "<Answer 200, complete, 0 bytes left>"


def test_a_switch_that_was_asked_for() -> None:
    """Everything behind its head is the other protocol's, until the end."""
    answer = AnswerParser(upgrades=True)
    assert (
        answer.feed(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nContent-Length: 3\r\n\r\nframes") == b"frames"
    )
    assert answer.head
    assert (answer.head.status, answer.head.keep_alive, answer.complete) == (101, False, False)
    assert answer.feed(b"more") == b"more"
    answer.end()
    assert answer.complete


def test_another_answer_to_one_who_asks_for_a_switch() -> None:
    answer = AnswerParser(upgrades=True)
    assert answer.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno") == b"no"
    assert answer.complete
