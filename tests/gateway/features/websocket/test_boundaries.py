"""Where frames end, for any cutting, of frames that the library `websockets` has made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from websockets import frames as theirs

from gateway.features.websocket.boundaries import MAX_FRAMES, Boundaries

FRAMES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 9, 10]), st.binary(max_size=9) | st.sampled_from([b"x" * 126, b"x" * 70_000]), st.booleans()
    )
)


@given(FRAMES, st.lists(st.integers(1, 80_000), min_size=1), st.booleans())
def test_any_cutting_gives_the_same_boundaries(made: list[tuple[int, bytes, bool]], sizes: list[int], closes: bool) -> None:
    data, ends = b"", {0}
    for opcode, payload, mask in made:
        data += theirs.Frame(theirs.Opcode(opcode), payload if opcode < 8 else payload[:125]).serialize(mask=mask)
        ends.add(len(data))
    before_close = len(data)
    if closes:
        data += theirs.Frame(theirs.Opcode.CLOSE, b"\x03\xe8").serialize(mask=False)
        ends.add(len(data))
    seen, at, number = Boundaries(), 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        number += 1
        seen.feed(data[at : at + size])
        at = min(at + size, len(data))
        assert seen.between == (at in ends)
        assert seen.closing == (closes and at >= before_close + 2)


def test_very_many_frames_lose_the_place() -> None:
    seen = Boundaries()
    seen.feed(b"\x8a\x00" * MAX_FRAMES)
    assert seen.between
    seen.feed(b"\x8a\x00" * (MAX_FRAMES + 1))
    assert not seen.between
    seen.feed(b"\x88\x00")
    assert not seen.closing
