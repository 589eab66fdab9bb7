"""A stream that breaks off must not look complete to the clients of its API: what they get, as bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from gateway.dialects.events.reader import MAX_EVENT_BYTES
from gateway.dialects.responses.stream import number_in
from gateway.dialects.table import Dialects
from gateway.errors import GatewayError, shutting_down
from tests.gateway.conftest import BODY, running
from tests.support.fakes import DONE, STREAM_HEAD, Behaviour, FakeReplica, FakeRequest, chunk, event, http, writes

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
STREAM = {**BODY, "input": "hi", "stream": True}


def named(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **more}).encode())


def breaks_off(*parts: bytes) -> Behaviour:
    """A stream that is lost after these parts, each in a chunk of its own."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        for part in (STREAM_HEAD, *map(chunk, parts)):
            writer.write(part)
            await writer.drain()
        writer.close()

    return behave


async def streamed(url: str, path: str) -> tuple[bytes, bool]:
    """What comes, and whether it ended as a whole answer does."""
    got = bytearray()
    async with aiohttp.ClientSession() as session, session.post(url + path, json=STREAM) as answer:
        assert answer.status == 200
        try:
            async for data in answer.content.iter_any():
                got += data
        except aiohttp.ClientError:
            return bytes(got), False
    return bytes(got), True


def data_after(got: bytes, sent: bytes, begin: bytes) -> dict[str, Any]:
    assert got.startswith(sent + begin)
    assert got.endswith(b"\n\n")
    found: dict[str, Any] = json.loads(got[len(sent + begin) :])
    return found


async def test_a_stream_of_anthropics_ends_with_its_error_event() -> None:
    """Its clients ignore an event without a name, and would take a clean end for that of the answer."""
    sent = named("message_start", message={}) + named("content_block_start", index=0) + named("content_block_delta", index=0)
    async with FakeReplica([breaks_off(sent)]) as replica, running(replica) as run:
        got, whole = await streamed(run.url, MESSAGES)
    assert whole
    data = data_after(got, sent, b"event: error\ndata: ")
    assert (data["type"], data["error"]["type"]) == ("error", "api_error")
    assert "failed while it answered" in data["error"]["message"]


@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/resp_1/more"])
async def test_a_stream_of_responses_ends_with_a_numbered_error_event(path: str) -> None:
    sent = named("response.created", sequence_number=7) + named("response.output_text.delta", sequence_number=8)
    half = b'event: x\ndata: {"sequence_number": 99'  # never goes out
    async with FakeReplica([breaks_off(sent, half)]) as replica, running(replica) as run:
        got, whole = await streamed(run.url, path)
    assert whole
    data = data_after(got, sent, b"event: error\ndata: ")
    assert (data["type"], data["sequence_number"], data["code"]) == ("error", 9, "replica_failed")
    assert data["message"] == data["error"]["message"]  # the flat one is documented; `error` is what official clients raise


async def test_the_official_client_raises_it() -> None:
    sent = named("response.created", sequence_number=0, response={})
    sent += named("response.output_text.delta", sequence_number=1, delta="x", item_id="i", output_index=0, content_index=0)
    async with FakeReplica([breaks_off(sent)]) as replica, running(replica) as run:
        stream = await run.client.responses.create(model="m", input="hi", stream=True)
        assert (await anext(aiter(stream))).type == "response.created"
        assert (await anext(aiter(stream))).type == "response.output_text.delta"
        with pytest.raises(openai.APIError, match="failed while it answered"):
            await anext(aiter(stream))


async def test_later_events_are_numbered_too() -> None:
    first, second = (named("response.output_text.delta", sequence_number=number) for number in (0, 1))
    go_on = asyncio.Event()

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(first))
        await go_on.wait()
        writer.write(chunk(second))
        await writer.drain()
        writer.close()

    async with (
        FakeReplica([behave]) as replica,
        running(replica) as run,
        run.session.post(run.url + RESPONSES, json=STREAM) as answer,
    ):
        assert await answer.content.readexactly(len(first)) == first
        go_on.set()
        got = await answer.read()
    assert data_after(got, second, b"event: error\ndata: ")["sequence_number"] == 2


async def test_a_stream_of_an_unknown_api_is_cut() -> None:
    sent = named("speech.audio.delta", audio="AA==")
    async with FakeReplica([breaks_off(sent)]) as replica, running(replica) as run:
        assert await streamed(run.url, "/v1/audio/speech") == (sent, False)


async def test_a_stream_of_chats_ends_with_an_error_and_done() -> None:
    async with FakeReplica([breaks_off(event("a"))]) as replica, running(replica) as run:
        got, whole = await streamed(run.url, CHAT)
    assert whole
    assert got.endswith(DONE)
    assert data_after(got.removesuffix(DONE), event("a"), b"data: ")["error"]["code"] == "replica_failed"


def stream_error(path: str, error: GatewayError) -> bytes | None:
    return Dialects().at(path).error_event(error, None)


LONG = "The input (61709 tokens) is longer than the model's context length (40960 tokens)."
ITS_ERROR: Any = {"object": "error", "message": LONG, "type": "BadRequestError", "code": 400}
FAILED = {"id": "r", "status": "failed", "error": {"code": "server_error", "message": LONG}}
CHAT_ERROR = b"data: %b\n\n" % json.dumps({"error": ITS_ERROR}).encode() + DONE


@pytest.mark.parametrize(
    ("path", "begin", "error", "words"),
    [
        (CHAT, b": ping\n\n", CHAT_ERROR, "context_length_exceeded"),
        (CHAT, event(""), CHAT_ERROR, "context_length_exceeded"),
        (MESSAGES, b"", named("error", error=ITS_ERROR), "prompt is too long: 61709 tokens > 40960 maximum"),
        (
            MESSAGES,
            named("ping"),
            named("error", error={"type": "api_error", "message": LONG}),
            "prompt is too long: 61709 tokens",
        ),
        (RESPONSES, b"", named("error", message=LONG, code=None, sequence_number=0), "context_length_exceeded"),
        (RESPONSES, named("response.created"), named("response.failed", response=FAILED), "context_length_exceeded"),
    ],
)
async def test_a_full_context_that_a_stream_reports_has_the_words_of_the_api(
    path: str, begin: bytes, error: bytes, words: str
) -> None:
    async with (
        FakeReplica([writes(http(200, begin + error, "text/event-stream"))] * 2) as one,
        FakeReplica([writes(http(200, begin + error, "text/event-stream"))] * 2) as other,
        running(one, other) as run,
    ):
        got, whole = await streamed(run.url, path)
        assert whole
        assert words in got.decode()
        assert got.startswith(begin)
        assert got.count(b"data: ") == (begin + error).count(b"data: ")
        assert len(one.requests) + len(other.requests) == 1, "another replica would say the same"


def test_a_gateway_that_goes_down_is_overloaded_in_anthropics_words() -> None:
    assert b'"type":"overloaded_error"' in (stream_error(MESSAGES, shutting_down()) or b"")
    assert b'"type":"api_error"' in (stream_error(MESSAGES, GatewayError(502, "replica_failed", "no")) or b"")
    assert b"[DONE]" not in (stream_error(MESSAGES, shutting_down()) or b"")
    assert b'"type":"overloaded_error"' in (stream_error("/v1/messages/batches", shutting_down()) or b"")


@pytest.mark.parametrize(
    ("events", "found"),
    [
        (b"", 4),
        (named("a", sequence_number=5) + named("b", sequence_number=6), 6),
        (b'data: {"sequence_number":7}\n\n', 7),
        (named("a", text='"sequence_number": 9'), 4),  # a text
        (b'data: {"sequence_number":"x"}\n\n', 4),
    ],
)
def test_the_number_of_an_event(events: bytes, found: int) -> None:
    assert number_in(events, 4) == found


# -- within an event whose head has gone out already


@pytest.mark.parametrize("ends", ["breaks off", "ends"])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_nothing_is_glued_into_half_an_event(path: str, resumed: bool, ends: str) -> None:
    half = event("z" * (MAX_EVENT_BYTES + 4096)).rstrip(b"\n")

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("a")) + chunk(half))
        if ends == "ends":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        if ends != "ends":
            writer.close()

    async with FakeReplica([behave]) as replica:
        pool = {"replicas": [replica.url], "resume_streams": resumed}
        async with running(pools=[pool]) as run:
            got, whole = await streamed(run.url, path)
    assert not whole
    assert (event("a") + half).startswith(got)


async def test_an_error_after_a_large_whole_event_is_an_event() -> None:
    large = event("z" * (MAX_EVENT_BYTES + 4096))
    async with FakeReplica([breaks_off(large[:-50], large[-50:])]) as replica, running(replica) as run:
        got, whole = await streamed(run.url, CHAT)
    assert whole
    assert got.startswith(large + b'data: {"error"')
