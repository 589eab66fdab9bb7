"""Replicas' answers: what http1 makes of some bytes, a simple reader that has to agree with it, and made-up bytes.

The simple reader takes a whole connection's bytes at once and uses no regular expression and no state, so that it and http1
have no code and few thoughts in common.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from gateway.upstream.http1 import Answer, FramingError
from scripts.fuzzing.mutate import cut, mutate

TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
HEX = frozenset(b"0123456789abcdefABCDEF")
CONTROL = frozenset(range(32)) - {9} | {127}


class Outcome(NamedTuple):
    """What a reader makes of all bytes of a connection. early: complete before the connection ended."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    rest: bytes
    early: bool


class Refused(NamedTuple):
    why: str


def read(pieces: list[bytes], *, to_head: bool = False) -> Outcome | Refused:
    """http1's view. Any exception but FramingError escapes: it is a bug."""
    answer, body, rest = Answer(to_head=to_head), b"", b""
    try:
        for piece in pieces:
            if answer.complete:
                rest += piece
            else:
                body += answer.feed(piece)
        early = answer.complete
        if not early:
            answer.end()
    except FramingError as error:
        return Refused(str(error))
    assert answer.complete
    assert answer.head
    return Outcome(answer.head.status, _others(answer.head.headers), body, answer.rest + rest, early)


def _others(headers: list[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """All but the lengths: http1 does not always keep them."""
    return tuple(pair for pair in headers if pair[0] != b"content-length")


# -- the simple reader


class _No(Exception):
    pass


def _need(good: object) -> None:
    if not good:
        raise _No


def simply(data: bytes, *, to_head: bool = False) -> Outcome | None:
    """None: refused. It knows no limits of size."""
    try:
        return _simply(data, to_head)
    except _No:
        return None


def _simply(data: bytes, to_head: bool) -> Outcome:
    status = 100
    while status < 200:
        head, found, data = data.partition(b"\r\n\r\n")
        _need(found)
        first, *lines = head.split(b"\r\n")
        _need(first[:9] in (b"HTTP/1.0 ", b"HTTP/1.1 ") and first[9:12].isdigit() and len(first[9:12]) == 3)
        _need(first[12:13] in (b"", b" ") and not CONTROL & set(first))
        status, headers = int(first[9:12]), [_field(line) for line in lines]
        _need(status >= 100 and status != 101)
        lengths = [value for name, value in headers if name == b"content-length"]
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        _need(len(lengths) + len(codings) <= 1)
        _need(codings in ([], [b"chunked"]) and (not codings or first[:9] == b"HTTP/1.1 "))
        _need(not lengths or (lengths[0].isdigit() and len(lengths[0]) <= 15))
    if to_head or status in (204, 304):
        return Outcome(status, _others(headers), b"", data, True)
    if codings:
        body, rest = _chunks(data)
        return Outcome(status, _others(headers), body, rest, True)
    if lengths:
        size = int(lengths[0])
        _need(len(data) >= size)
        return Outcome(status, _others(headers), data[:size], data[size:], True)
    return Outcome(status, _others(headers), data, b"", False)


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    _need(colon and name and set(name) <= TOKEN and not CONTROL & set(value))
    return name.lower(), value.strip(b" ")


def _chunks(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, found, data = data.partition(b"\r\n")
        digits = line.partition(b";")[0].rstrip(b" \t")
        _need(found and 1 <= len(digits) <= 15 and set(digits) <= HEX and not CONTROL & set(line))
        size = int(digits, 16)
        if not size:
            break
        _need(data[size : size + 2] == b"\r\n")
        body, data = body + data[:size], data[size + 2 :]
    while True:
        line, found, data = data.partition(b"\r\n")
        _need(found)
        if not line:
            return body, data
        _field(line)


# -- made-up bytes

_STARTS = [b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.0 200 OK", b"HTTP/1.1 204 No", b"HTTP/1.1 304 N", b"HTTP/1.1 100 C"]
_STARTS += [
    b"HTTP/1.1 101 S",
    b"HTTP/1.1 500 \xe9",
    b"HTTP/1.1 099 X",
    b"HTTP/1.2 200 OK",
    b"HTTP/1.1  200 OK",
    b"http/1.1 200 OK",
]
_FIELDS = [
    b"Content-Length: 5",
    b"Content-Length: 0",
    b"content-length:5",
    b"Content-Length: +5",
    b"Content-Length: -5",
    b"Content-Length: 0x5",
    b"Content-Length: 5_0",
    b"Content-Length: 5, 5",
    b"Content-Length: \xd9\xa5",
    b"Content-Length : 5",
    b"Content-Length: 999999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: Chunked \t",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding:\x0bchunked",
    b"Transfer-Encoding: xchunked",
    b"Connection: close",
    b"Connection: keep-alive, X",
    b"X: y",
    b" folded",
    b"\tfolded",
    b"X: a\rb",
    b"X: a\nContent-Length: 5",
    b"X: a\x00b",
    b": empty",
    b"no colon",
    b"X:",
]
_BODIES = [
    b"",
    b"hello",
    b"hell",
    b"hello!",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5;a=b;c\r\nhello\r\n0\r\nT: 1\r\n\r\n",
    b"2\r\nhe\r\n3 \r\nllo\r\n0\r\n\r\n",
    b"5\r\nhello!\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"-5\r\nhello\r\n0\r\n\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"5_\r\nhello\r\n0\r\n\r\n",
    b"0\r\n folded\r\n\r\n",
    b"0\r\nT : 1\r\n\r\n",
    b"00000000000000005\r\nhello\r\n0\r\n\r\n",
    b"fffffffffffffff\r\nhello",
    b"0\r\n\r",
    b"\r\n5\r\nhello\r\n0\r\n\r\n",
]
TOKENS = [
    *_FIELDS,
    *_BODIES,
    b"\r\n",
    b"\r",
    b"\n",
    b"\r\n\r\n",
    b"\x00",
    b"0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b";",
    b":",
    b" ",
]


def invent(chance: Random) -> bytes:
    """One answer, or something like it."""
    parts = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        lines = [chance.choice(_STARTS if chance.random() < 0.4 else _STARTS[:3])]
        lines += [chance.choice(_FIELDS) for _ in range(chance.choice([0, 1, 1, 2, 3]))]
        parts.append(b"\r\n".join(lines) + b"\r\n\r\n" + chance.choice(_BODIES))
    return b"".join(parts)


def cases() -> list[bytes]:
    """Every start with every field and, where it could matter, every body."""
    rows = [(start, one, body) for start in _STARTS for one in _FIELDS for body in (b"hello", b"5\r\nhello\r\n0\r\n\r\n")]
    rows += [
        (_STARTS[0], one, body) for one in (b"Transfer-Encoding: chunked", b"Content-Length: 5", b"X: y") for body in _BODIES
    ]
    rows += [(_STARTS[0], one + b"\r\n" + two, _BODIES[4]) for one in _FIELDS[:20] for two in _FIELDS[:20]]
    return [b"%b\r\n%b\r\n\r\n%b" % row for row in rows]


# -- what must hold


def check(data: bytes, chance: Random) -> str:
    """Raises AssertionError, or whatever else escapes. Returns the kind of outcome, for the statistics."""
    kinds = []
    for to_head in (False, True):
        whole = read([data], to_head=to_head)
        for pieces in (cut(data, chance), [bytes([byte]) for byte in data] if len(data) < 2000 else cut(data, chance)):
            again = read(pieces, to_head=to_head)
            if isinstance(whole, Refused):
                assert isinstance(again, Refused), (pieces, again)
            else:
                assert again == whole, (pieces, whole, again)
        if len(data) < 4000:  # below all limits of size
            simple = simply(data, to_head=to_head)
            assert (None if isinstance(whole, Refused) else whole) == simple, (data, whole, simple)
        kinds.append(whole.why if isinstance(whole, Refused) else f"{whole.status // 100}xx, early {whole.early}")
    return "; ".join(kinds)


def one(data: bytes, chance: Random) -> tuple[bytes, str]:
    """One input made of a known one (or of nothing), and its kind."""
    made = mutate(data or invent(chance), chance, TOKENS) if chance.random() < 0.8 else invent(chance)
    return made, check(made, chance)
