"""The tokens of a realtime session: read in any cutting of any frames, bounded, and through a whole gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection

from gateway.dialects.usage import Usage
from gateway.features.websocket.boundaries import MAX_FRAMES, Boundaries
from gateway.features.websocket.usage_tap import MAX_EVENT, UsageTap, usage_of
from tests.gateway.conftest import eventually, running
from tests.gateway.features.websocket.test_tunnel import RealtimeReplica, dial


def done(prompt: int = 10, completion: int = 3, cached: int | None = 4, *, pad: int = 0) -> dict[str, Any]:
    usage: dict[str, Any] = {"total_tokens": prompt + completion, "input_tokens": prompt, "output_tokens": completion}
    if cached is not None:
        usage["input_token_details"] = {"cached_tokens": cached, "text_tokens": prompt, "audio_tokens": 0}
    response = {"object": "realtime.response", "status": "completed", "output": ["x" * pad], "usage": usage}
    return {"type": "response.done", "event_id": "e", "response": response}


def frame(data: bytes, *, opcode: int = 1, fin: bool = True, reserved: int = 0) -> bytes:
    size = len(data)
    length = bytes((size,)) if size < 126 else b"\x7f" + size.to_bytes(8, "big")
    if 126 <= size < 1 << 16:
        length = b"\x7e" + size.to_bytes(2, "big")
    return bytes((fin << 7 | reserved << 4 | opcode,)) + length + data


def text(event: Any) -> bytes:
    return json.dumps(event).encode()


def tapped(*pieces: bytes) -> UsageTap:
    tap = UsageTap()
    boundaries = Boundaries(tap)
    for piece in pieces:
        boundaries.feed(piece)
    return tap


EVENTS = st.one_of(
    st.builds(done, st.integers(0, 900), st.integers(0, 900), st.none() | st.integers(0, 900), pad=st.sampled_from([0, 300])),
    st.builds(lambda delta: {"type": "response.output_audio.delta", "delta": delta}, st.text(max_size=200)),
    st.just({"type": "response.output_text.delta", "delta": '"type": "response.done"'}),
)


@given(st.data())
def test_any_cutting_of_any_frames_gives_the_sum(data: st.DataObject) -> None:
    stream, told = b"", list[Usage]()
    for event in data.draw(st.lists(EVENTS, max_size=6)):
        if event["type"] == "response.done":
            usage = event["response"]["usage"]
            cached = usage.get("input_token_details", {}).get("cached_tokens")
            prompt = usage["input_tokens"]
            told.append(Usage(prompt, usage["output_tokens"], None if cached is None else min(cached, prompt)))
        raw = text(event)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=2)))
        parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        for at, part in enumerate(parts):
            stream += frame(part, opcode=0 if at else 1, fin=at == len(parts) - 1)
            if data.draw(st.booleans()):
                stream += frame(b'"response.done"', opcode=9)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    tap = tapped(*(stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)))
    assert not tap.unread
    if not told:
        assert tap.usage is None
    else:
        cached = None if all(one.cached is None for one in told) else sum(one.cached or 0 for one in told)
        assert tap.usage == Usage(sum(one.prompt for one in told), sum(one.completion for one in told), cached)


@pytest.mark.parametrize(
    "stream",
    [
        frame(text(done()), reserved=4),
        frame(text({"type": "response.done", "response": {}})),
        frame(text({"type": "response.done", "response": {"usage": {"input_tokens": -1, "output_tokens": 1}}})),
        frame(text({"type": "response.done", "response": {"usage": {"input_tokens": 10**12, "output_tokens": 1}}})),
        frame(text({"type": "response.done", "response": {"usage": {"input_tokens": 10**8, "output_tokens": 1}}})),
        frame(text({"type": "response.done", "response": {"usage": {"input_tokens": 1, "output_tokens": 10**8}}})),
        frame(text(done(pad=MAX_EVENT))),
        frame(text(done())[:40], fin=False) + frame(b"x" * MAX_EVENT, opcode=0),
        bytes((0x81, 0x80 | 4)) + b"mask" + b"abcd",
        b"\x8a\x00" * (MAX_FRAMES + 1),
    ],
    ids=[
        "compressed",
        "no usage",
        "negative",
        "absurd",
        "no such prompt",
        "no such answer",
        "too long",
        "too long in parts",
        "masked",
        "too many frames",
    ],
)
def test_what_cannot_be_read_is_known_to_be_missing(stream: bytes) -> None:
    tap = tapped(stream, frame(text({"type": "response.created"})))
    assert (tap.usage, tap.unread) == (None, True)


@pytest.mark.parametrize(
    "stream",
    [
        frame(b"\xff" * 1000, opcode=2),
        frame(b"x" * (MAX_EVENT + 1)),
        frame(b'{"type": "response.done", '),
        frame(b'["response.done"]'),
        frame(text({"type": "x", "of": "response.done"})),
        frame(b"[" * 100_000 + b'"response.done"'),
        frame(b"", opcode=0) * 100,
    ],
)
def test_what_is_no_such_event_is_no_matter(stream: bytes) -> None:
    tap = tapped(stream, frame(text(done())))
    assert (tap.usage, tap.unread) == (Usage(10, 3, 4), False)


@pytest.mark.parametrize("text_", ['"\\ud83d"', "NaN"], ids=["half a surrogate pair", "NaN"])
def test_what_engines_write_beside_the_usage_hides_none(text_: str) -> None:
    event = text(done()).replace(b'"completed"', text_.encode())
    assert tapped(frame(event)).usage == Usage(10, 3, 4)


def test_a_flood_of_pieces_is_bounded() -> None:
    tap = UsageTap()
    boundaries = Boundaries(tap)
    boundaries.feed(frame(b"", fin=False))
    for _ in range(100):
        boundaries.feed(frame(b"x" * 10_000, opcode=0, fin=False))
        assert len(tap._held) <= MAX_EVENT


def test_what_engines_report_as_in_chat() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    event = {"type": "transcription.done", "text": "hi", "usage": usage}
    assert tapped(frame(text(event))).usage == Usage(7, 2, None)
    assert usage_of({"usage": {"input_tokens": 3}}) is None
    assert usage_of([]) is None


async def session(connection: ServerConnection) -> None:
    async for message in connection:
        if message == "none":
            await connection.send(text({"type": "response.done", "response": {"usage": None}}).decode())
            continue
        for _ in range(3):
            await connection.send(text({"type": "response.output_audio.delta", "delta": "A" * 100_000}).decode())
        await connection.send(text(done(100, 20, 40)).decode())


async def test_a_session_is_metered_and_priced(request_lines: Any) -> None:
    prices = {"m": {"input": 1.0, "cached_input": 0.5, "output": 2.0}}
    async with RealtimeReplica(session).up() as replica, running(replica.url, prices=prices) as run:
        async with dial(run) as client:
            for _ in range(2):
                await client.send("go")
                for _ in range(4):
                    await client.recv()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        name = replica.url.removeprefix("http://")
        metrics = await run.metrics()
        assert metrics[f'warmroute_prompt_tokens_total{{cache="miss",model="m",replica="{name}"}}'] == 120
        assert metrics[f'warmroute_prompt_tokens_total{{cache="hit",model="m",replica="{name}"}}'] == 80
        assert metrics[f'warmroute_completion_tokens_total{{model="m",replica="{name}"}}'] == 40
        assert not any(sample.startswith("warmroute_unmetered_requests_total{") for sample in metrics)
    (line,) = request_lines()
    assert (line["status"], line["prompt_tokens"], line["cached_tokens_reported"], line["completion_tokens"]) == (
        101,
        200,
        80,
        40,
    )
    assert line["cost_usd"] == pytest.approx((120 * 1.0 + 80 * 0.5 + 40 * 2.0) / 1e6)


async def test_a_client_that_leaves_has_used_what_it_has_used(request_lines: Any) -> None:
    async with RealtimeReplica(session).up() as replica, running(replica.url) as run:
        client = await dial(run)
        await client.send("go")
        for _ in range(4):
            await client.recv()
        client.transport.abort()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        await eventually(request_lines)
    (line,) = request_lines()
    assert (line["status"], line["prompt_tokens"]) == (499, 200 // 2)


async def test_a_session_without_usage_is_unmetered() -> None:
    async with RealtimeReplica(session).up() as replica, running(replica.url) as run:
        unmetered = 'warmroute_unmetered_requests_total{endpoint="/v1/realtime",model="m"}'
        async with dial(run):
            pass
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        assert unmetered not in await run.metrics(), "nothing was generated"
        async with dial(run) as client:
            await client.send("none")
            await client.recv()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        async with asyncio.timeout(20):
            assert (await run.metrics())[unmetered] == 1


@given(st.data())
def test_a_message_that_is_too_long_is_searched_to_its_end(data: st.DataObject) -> None:
    """However it is cut into frames and reads, and wherever the name of the event stands."""
    marked = data.draw(st.booleans())
    before = data.draw(st.integers(0, MAX_EVENT + 100))
    kind = b'"response.done"' if marked else b'"response.other"'
    raw = b'{"a": "' + b"x" * before + b'", "type": ' + kind + b', "b": "' + b"x" * (MAX_EVENT + 200 - before) + b'"}'
    at = raw.index(kind)
    near = st.integers(at - 3, at + len(kind) + 3) | st.integers(0, len(raw))
    cuts = sorted(data.draw(st.lists(near, max_size=2)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    stream = b"".join(frame(part, opcode=0 if n else 1, fin=n == len(parts) - 1) for n, part in enumerate(parts))
    stream += frame(text(done()))
    cuts = sorted(data.draw(st.lists(near | st.integers(0, len(stream)), max_size=4)))
    tap = tapped(*(stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)))
    assert tap.unread == marked
    assert tap.usage == Usage(10, 3, 4), "the next message is read"
