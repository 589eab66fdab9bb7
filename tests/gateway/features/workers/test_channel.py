from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.cluster.messages import Drain, EventBatch, Reset
from gateway.features.workers.channel import HEAD, MAX_MESSAGE_BYTES, Channel
from gateway.features.workers.messages import (
    COUNTERS,
    MEMBERS,
    Ask,
    CatchUpEnd,
    Execute,
    Heartbeat,
    Message,
    Publish,
    SourceMember,
    SourceMembers,
    TopicAnswer,
    Welcome,
    encode,
    from_worker,
)
from tests.gateway.features.workers.conftest import closed, pair

numbers = st.integers(0, 2**32 - 1)
workers = st.integers(0, 2**64 - 1)
batches = st.builds(EventBatch, st.floats(allow_nan=False), st.binary(max_size=30))
found = st.builds(
    SourceMembers, st.text(max_size=5), st.tuples(st.builds(SourceMember, capacity_tokens=st.none() | st.just(7)))
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Heartbeat, st.sampled_from(["", "serving", "stopping"])),
    batches,
    st.builds(Reset, st.booleans()),
    st.builds(Publish, st.just(COUNTERS) | st.text(max_size=5), st.binary(max_size=30)),
    st.builds(Publish, st.just(MEMBERS), found.map(encode)),
    st.builds(Ask, numbers, st.just(COUNTERS) | st.text(max_size=5), st.binary(max_size=30)),
    st.builds(Execute, numbers, st.builds(Drain, st.text(max_size=5), st.booleans()), st.just(1.0)),
    st.builds(
        TopicAnswer, numbers, st.binary(max_size=30), st.text(max_size=5), st.none() | st.text(max_size=9), st.booleans()
    ),
)
frames = st.lists(st.tuples(workers, messages), max_size=8)


def framed(payload: bytes, worker: int = 0) -> bytes:
    return HEAD.pack(len(payload), worker) + payload


@given(frames, st.data())
def test_any_cutting_gives_the_same_frames(sent: list[tuple[int, Message]], data: st.DataObject) -> None:
    wire = b"".join(framed(encode(message), worker) for worker, message in sent)
    received: list[tuple[int, Message]] = []
    channel = Channel(from_worker)

    def receive(worker: int, message: Message, payload: bytes) -> None:
        assert payload == encode(message)
        received.append((worker, message))

    late = data.draw(st.booleans())  # there is no receiver at first
    if not late:
        channel.receive(receive, lambda: None)
    while wire:
        cut = data.draw(st.integers(1, len(wire)))
        channel.data_received(wire[:cut])
        wire = wire[cut:]
    if late:
        assert received == []
        channel.receive(receive, lambda: None)
    assert received == sent
    assert channel.error is None


@given(st.lists(st.binary(max_size=40) | messages.map(lambda message: framed(encode(message))), max_size=4), st.integers(0, 80))
@example([framed(b"\x91\x05"), framed(b"")], 0)
def test_any_bytes_are_frames_or_the_end_of_the_channel(parts: list[bytes], flip: int) -> None:
    wire = bytearray(b"".join(parts))
    if flip < len(wire):
        wire[flip] ^= 1 << flip % 8
    received: list[Message] = []
    channel = Channel(from_worker)
    channel.receive(lambda _worker, message, _payload: received.append(message), lambda: None)
    channel.data_received(bytes(wire))
    if channel.error is not None:
        assert "a message of " in str(channel.error)
        before = len(received)
        channel.data_received(framed(encode(Heartbeat())))
        assert len(received) == before, "nothing behind it can be trusted"


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (HEAD.pack(MAX_MESSAGE_BYTES + 1, 3), "a message of 268435457 bytes; at most 268435456 are possible"),
        (framed(b"junk"), "a message of 4 bytes does not decode: "),
        (framed(b""), "a message of 0 bytes does not decode: "),
        (framed(encode(CatchUpEnd())), "does not decode: Invalid value 7"),
        (framed(encode(EventBatch(1.0, "text"))), "Expected `bytes`, got `str` - at `$[2]`"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_frame_ends_the_channel_and_is_named(
    wire: bytes, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, its = await pair()
    gone = asyncio.Event()
    ours.receive(lambda *_: None, gone.set)
    its.send(Heartbeat())
    assert its._transport
    its._transport.write(wire)
    await gone.wait()
    assert error in str(ours.error)
    assert "the channel to another process is broken" in caplog.text
    await closed(its)


async def test_the_first_frame_is_taken_alone_and_the_rest_waits() -> None:
    ours, its = await pair()
    ours.send(Welcome(b"config"), 7)
    for number in (1, 2):
        ours.send(Ask(number, "t"), 7)
    assert await its.first() == (7, Welcome(b"config"))
    received: list[Message] = []
    gone = asyncio.Event()
    its.receive(lambda _worker, message, _payload: received.append(message), gone.set)
    ours.close()
    await gone.wait()
    assert received == [Ask(1, "t"), Ask(2, "t")]
    its.send(Heartbeat())  # nobody is there: nothing happens
    assert its.unsent == 0
    await closed(ours, its)


async def test_without_a_first_frame_there_is_an_error_and_the_end_is_reported_late() -> None:
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
    ours.send(Publish(COUNTERS, b"x" * (8 << 20)))
    assert ours.unsent > 1 << 20
    await closed(its, ours)
