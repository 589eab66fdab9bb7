from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.channel import Channel
from tests.gateway.workers.conftest import closed, pair

numbers = st.integers(0, 2**32 - 1)
frames = st.lists(st.tuples(st.integers(0, 255), numbers, numbers, st.binary(max_size=30)), max_size=8)


@given(frames, st.data())
def test_any_cutting_gives_the_same_frames(sent: list[tuple[int, int, int, bytes]], data: st.DataObject) -> None:
    wire = b"".join(struct.pack("<IBII", len(payload), *head) + payload for *head, payload in sent)
    heard: list[tuple[int, int, int, bytes]] = []
    channel = Channel()
    late = data.draw(st.booleans())  # nobody listens at first
    if not late:
        channel.receive(lambda *frame: heard.append(frame), lambda: None)
    while wire:
        cut = data.draw(st.integers(1, len(wire)))
        channel.data_received(wire[:cut])
        wire = wire[cut:]
    if late:
        assert heard == []
        channel.receive(lambda *frame: heard.append(frame), lambda: None)
    assert heard == sent


async def test_the_first_frame_is_taken_alone_and_the_rest_waits() -> None:
    ours, its = await pair()
    for number in range(3):
        ours.send(4, 7, number, b"x" * number)
    assert await its.first() == (4, 7, 0, b"")
    heard: list[int] = []
    gone = asyncio.Event()
    its.receive(lambda _kind, _who, number, _payload: heard.append(number), gone.set)
    ours.close()
    await gone.wait()
    assert heard == [1, 2]
    its.send(4)  # nobody is there: nothing happens
    assert its.unsent == 0
    await closed(ours, its)


async def test_without_a_first_frame_there_is_an_error_and_the_end_is_told_late() -> None:
    ours, its = await pair()
    waiting = asyncio.create_task(its.first())
    await closed(ours)
    with pytest.raises(ConnectionError):
        await waiting
    gone = asyncio.Event()
    its.receive(lambda *_: None, gone.set)
    assert gone.is_set()
    await closed(its)


async def test_what_the_other_end_does_not_read_is_counted() -> None:
    ours, its = await pair()
    assert its._transport
    its._transport.pause_reading()  # type: ignore[attr-defined]
    ours.send(1, payload=b"x" * (8 << 20))
    assert ours.unsent > 1 << 20
    await closed(its, ours)
