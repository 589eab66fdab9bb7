"""Frames: any cutting gives the same messages, as the library `websockets` makes and reads them."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets import frames as theirs
from websockets.exceptions import ProtocolError
from websockets.streams import StreamReader

from gateway.features.websocket import frames
from gateway.features.websocket.frames import CLOSE, MAX_FRAMES, PING, PONG, TEXT, FrameReader

MOST = 1 << 20
PIECES = 500  # of a cutting; single bytes of hundreds of kilobytes take a minute


def masked(opcode: int, data: bytes, *, fin: bool = True) -> bytes:
    return theirs.Frame(theirs.Opcode(opcode), data, fin=fin).serialize(mask=True)


def messages(reader: FrameReader, data: bytes, sizes: list[int]) -> list[tuple[str, bytes]]:
    """Whole messages and control frames, fed in pieces of these sizes, over and over; in large ones after many."""
    found, parts, at = list[tuple[str, bytes]](), b"", 0
    for size in itertools.chain(itertools.islice(itertools.cycle(sizes), PIECES), itertools.repeat(99_999)):
        reader.feed(data[at : at + size])
        at += size
        while True:
            for frame in reader.read():
                if frame.kind != TEXT:
                    found.append((frame.kind, frame.data))
                    continue
                parts += frame.data
                if frame.last:
                    found.append((TEXT, parts))
                    parts = b""
            if not reader.more:
                break
        if at >= len(data):
            return found
    raise AssertionError


TEXTS = st.lists(st.text(max_size=20) | st.sampled_from(["x" * 126, "é" * 40_000]), min_size=1, max_size=4)
CONTROL = st.tuples(st.sampled_from([9, 10]), st.binary(max_size=125))


@given(st.lists(st.tuples(TEXTS, st.lists(CONTROL, max_size=2)), max_size=5), st.lists(st.integers(1, 99_999), min_size=1))
def test_any_cutting_gives_the_same_messages(sent: list[tuple[list[str], list[tuple[int, bytes]]]], sizes: list[int]) -> None:
    """A message in fragments, with control frames among them; the parts are cut within characters, too."""
    data, wanted = b"", list[tuple[str, bytes]]()
    for parts, controls in sent:
        whole = "".join(parts).encode()
        cuts = [0, *sorted(len(whole) * number // len(parts) for number in range(1, len(parts))), len(whole)]
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if number == 1:
                data += b"".join(masked(opcode, payload) for opcode, payload in controls)
                wanted += [(PING if opcode == 9 else PONG, payload) for opcode, payload in controls]
            data += masked(0 if number else 1, whole[begin:end], fin=number == len(parts) - 1)
        wanted.append((TEXT, whole))
    reader = FrameReader(MOST)
    assert messages(reader, data, sizes) == wanted
    assert reader.error is None
    assert not reader.in_message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x02hi", 1002),  # not masked
        (masked(1, b"a", fin=False) + masked(1, b"b"), 1002),
        (masked(0, b"a"), 1002),
        (b"\xc1\x80mask", 1002),  # compressed
        (b"\x83\x80mask", 1002),  # an opcode that nobody knows
        (b"\x89\xfe\x00\x80mask", 1002),  # a ping of 128 bytes
        (b"\x09\x80mask", 1002),  # a ping in parts
        (masked(8, b"\x03"), 1002),
        (masked(8, struct.pack(">H", 1005)), 1002),
        (masked(8, struct.pack(">H", 1000) + b"\xff"), 1007),
        (masked(2, b"binary"), 1003),
        (masked(1, b"\xff"), 1007),
        (masked(1, "é".encode()[:1]), 1007),  # ends within a character
        (masked(1, "é".encode()[:1], fin=False) + masked(0, b"x"), 1007),
        (masked(1, b"x" * 20_001), 1009),
        (masked(1, b"x" * 10_001, fin=False) + masked(0, b"x" * 10_000), 1009),
        (b"\x81\xff" + b"\xff" * 12, 1009),  # of 2**64 - 1 bytes, which need not come
    ],
    ids=itertools.count(),  # the masks are random, and all processes that share the tests must give them the same names
)
def test_what_breaks_a_rule_ends_the_reading(data: bytes, code: int) -> None:
    for sizes in ([1], [len(data)]):
        reader = FrameReader(20_000)
        messages(reader, masked(1, b"good") + data, sizes)
        assert reader.error is not None
        assert reader.error.code == code
        reader.feed(masked(1, b"more"))
        assert reader.read() == []


def test_very_many_frames_are_read_in_turns() -> None:
    reader = FrameReader(MOST)
    reader.feed(masked(9, b"") * (3 * MAX_FRAMES + 1))
    sizes = []
    while not sizes or reader.more:
        sizes.append(len(reader.read()))
    assert sizes == [MAX_FRAMES, MAX_FRAMES, MAX_FRAMES, 1]


def test_nothing_is_read_after_a_close() -> None:
    reader = FrameReader(MOST)
    reader.feed(masked(8, struct.pack(">H", 1001) + b"bye") + masked(1, b"x"))
    (close,) = reader.read()
    assert (close.kind, frames.code_of(close.data)) == (CLOSE, 1001)
    reader.feed(masked(1, b"x"))
    assert reader.read() == []


def read_by_them(data: bytes) -> theirs.Frame:
    stream = StreamReader()
    stream.feed_data(data)
    reading = theirs.Frame.parse(stream.read_exact, mask=False)
    try:
        next(reading)
    except StopIteration as end:
        frame: theirs.Frame = end.value
        return frame
    raise AssertionError("it is not whole")


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 100_000])
def test_what_is_sent_is_what_they_read(size: int) -> None:
    assert read_by_them(frames.text_frame(b"x" * size)) == theirs.Frame(theirs.Opcode.TEXT, b"x" * size)


def test_control_frames_are_what_they_read() -> None:
    assert read_by_them(frames.ping_frame()) == theirs.Frame(theirs.Opcode.PING, b"")
    assert read_by_them(frames.pong_frame(b"p")) == theirs.Frame(theirs.Opcode.PONG, b"p")
    close = read_by_them(frames.close_frame(1001, "é" * 200))
    assert theirs.Close.parse(close.data) == theirs.Close(1001, "é" * 61)
    assert read_by_them(frames.close_frame(frames.NO_STATUS)).data == b""


def test_they_would_refuse_what_is_not_masked() -> None:
    """So the oracle of these tests is one that reads strictly."""
    stream = StreamReader()
    stream.feed_data(masked(1, b"x"))
    with pytest.raises(ProtocolError):
        next(theirs.Frame.parse(stream.read_exact, mask=False))
