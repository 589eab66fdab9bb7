"""Responses' WebSocket mode through a whole gateway: clients are `websockets`, and the official one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import State

from gateway.features.websocket.responses_socket import MAX_LANES, MAX_QUEUED
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.dialects.events.test_named import named
from tests.gateway.features.websocket.test_frames import masked
from tests.gateway.request.test_dialects import COMPLETED, CREATED, DELTA, counted, events, response
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, dies, http, status, streams, writes
from tests.support.tiers import gate

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
WHOLE = events(CREATED, DELTA, COMPLETED)
NAMES = [
    "response.created",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.completed",
]
CREATE: dict[str, Any] = {"type": "response.create", "model": "m", "input": "hi", "store": False}


def dial(run: Running, **options: Any) -> connect:
    return connect(run.url.replace("http", "ws") + "/v1/responses", proxy=None, **options)


async def send(client: ClientConnection, **more: Any) -> None:
    await client.send(json.dumps({**CREATE, **more}))


async def receive(client: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(20):
        found: dict[str, Any] = json.loads(await client.recv(decode=True))
    return found


async def answer(client: ClientConnection) -> list[dict[str, Any]]:
    """Messages up to the end of one response, or an error."""
    found = [await receive(client)]
    while found[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        found.append(await receive(client))
    return found


def types(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


async def closed(client: ClientConnection) -> tuple[int, str]:
    """The code and the reason with which the gateway closes."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionClosed):
            async for _ in client:
                pass
    return client.close_code or 0, client.close_reason or ""


async def nothing_held(run: Running) -> None:
    await eventually(lambda: run.gateway.served.memory.held == 0 and run.gateway.served.connections.open == 0)


async def test_a_message_is_a_request(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    """Routed, metered and logged as any other, with the headers of the request that opened the connection."""
    headers = {"Authorization": "Bearer k", "X-Tenant-Id": "t", "Session-Id": "s", "X-Request-Id": "mine", "OpenAI-Beta": "x"}
    async with FakeReplica(script=[WHOLE]) as replica, running(replica) as run:
        async with dial(run, additional_headers=headers) as client:
            await send(client, stream=False)
            messages = await answer(client)
            assert types(messages) == NAMES
            for message in messages:
                EVENTS.validate_python(message)
            await send(client, stream_id="a.b-1")
            assert {message["stream_id"] for message in await answer(client)} == {"a.b-1"}
        await nothing_held(run)
        first, second = replica.requests
        assert (first.method, first.path) == ("POST", "/v1/responses")
        assert first.json == {"model": "m", "input": "hi", "stream": True, "store": False}
        assert second.json == {"model": "m", "input": "hi", "stream": True, "store": False}
        got = first.headers
        assert (got["authorization"], got["x-tenant-id"], got["session-id"], got["openai-beta"]) == ("Bearer k", "t", "s", "x")
        assert not [name for name in got if name.startswith("sec-websocket") or name in ("upgrade", "connection")]
        assert got["content-type"] == "application/json"
        assert not {request.headers["x-request-id"] for request in replica.requests} & {"mine.1", "mine.2"}
        assert (await run.metrics())['warmroute_requests_total{code="200",endpoint="/v1/responses",model="m"}'] == 2
        assert counted(await run.metrics(), "prompt_tokens_total") == 200
    lines = request_lines()
    assert [(line["id"], line["status"], line["tenant"], line["prompt_tokens"]) for line in lines] == [
        ("mine.1", 200, "t", 100),
        ("mine.2", 200, "t", 100),
    ]


async def test_the_official_client() -> None:
    async with FakeReplica(script=[WHOLE]) as replica, running(replica) as run, run.client.responses.connect() as client:
        for _ in range(2):
            await client.response.create(model="m", input="hi")
            seen = []
            async for event in client:
                seen.append(event.type)
                if event.type == "response.completed":
                    assert event.response.usage
                    assert event.response.usage.input_tokens == 100
                    break
            assert seen == NAMES


async def test_the_official_client_raises_at_an_error() -> None:
    async with FakeReplica() as replica, running(replica) as run, run.client.responses.connect() as client:
        await client.response.create(model="nobody", input="hi")
        with pytest.raises(openai.OpenAIError, match="model_not_found"):
            await client.dispatch_events()


async def test_replicas_that_speak_chat_only_are_asked_in_chat() -> None:
    async def chat_only(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/chat/completions":
            await streams("hello")(request, writer)
        else:
            writer.write(http(404, b'{"detail":"Not Found"}'))

    async with FakeReplica(script=[chat_only]) as replica, running(replica) as run, dial(run) as client:
        await send(client)
        messages = await answer(client)
        assert messages[-1]["response"]["output"][0]["content"][0]["text"] == "hello"


@pytest.mark.parametrize(
    ("text", "status_", "code"),
    [
        ("hello", 400, "invalid_request"),
        ("[]", 400, "invalid_request"),
        ('{"type": "session.update"}', 400, "unknown_message_type"),
        ('{"type": "response.create", "stream_id": ""}', 400, "invalid_request"),
        ('{"type": "response.create", "model": "m", "input": 7}', 400, "invalid_request"),
        ('{"type": "response.create", "model": "m", "input": "x", }', 400, "invalid_json"),
        ('{"type": "response.create", "model": "other", "input": "x"}', 404, "model_not_found"),
        ('{"type": "response.create", "model": "m", "input": ' + "[" * 300_000, 400, None),
        ('{"type": "response.create", "model": "m", "x": [' + "[],[]," * 400_000 + "[]]}", 413, "request_too_complex"),
    ],
)
async def test_a_bad_message_is_answered_with_an_error(text: str, status_: int, code: str | None) -> None:
    """And the connection goes on."""
    async with FakeReplica(script=[WHOLE]) as replica, running(replica) as run, dial(run) as client:
        await client.send(text)
        error = await receive(client)
        assert (error["type"], error["status"]) == ("error", status_)
        assert code in (None, error["error"]["code"])
        await send(client)
        assert types(await answer(client)) == NAMES
        assert len(replica.requests) == 1


@pytest.mark.parametrize(
    ("behaviour", "wanted"),
    [
        (status(400, "bad input"), {"status": 400, "error": {"message": "bad input", "type": "t", "param": None, "code": 400}}),
        (status(429, "later", "Retry-After: 7"), {"status": 429, "headers": "7"}),
        (writes(http(503, b"<html>overloaded</html>")), {"status": 503, "code": "replica_error"}),
        (writes(http(200, b'{"object": "response"}')), {"status": 502, "code": "replica_failed"}),
        (writes(http(400, b"x" * 200_000)), {"status": 400, "code": "replica_error"}),
        (dies, {"status": 502, "code": "replica_failed"}),
    ],
)
async def test_an_answer_that_is_no_stream_is_one_error(behaviour: Behaviour, wanted: dict[str, Any]) -> None:
    async with FakeReplica(script=[behaviour]) as replica, running(replica) as run, dial(run) as client:
        await send(client, stream_id="a")
        error = await receive(client)
        assert (error["type"], error["status"], error["stream_id"]) == ("error", wanted["status"], "a")
        assert wanted.get("error", error["error"]) == error["error"]
        assert wanted.get("code", error["error"]["code"]) == error["error"]["code"]
        assert wanted.get("headers", error["headers"].get("retry-after")) == error["headers"].get("retry-after")
        assert error["headers"]["x-request-id"]
        await send(client)
        assert types(await answer(client)) == ["error"]


INCOMPLETE = named(
    "response.incomplete",
    response=response(status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
    sequence_number=4,
)


@pytest.mark.parametrize("end", [COMPLETED, INCOMPLETE])
async def test_a_message_that_wants_no_output(end: bytes) -> None:
    """As Codex sends it when it starts: the prompt is computed, and so it is cached for the first turn."""
    async with FakeReplica(script=[events(CREATED, DELTA, end)]) as replica, running(replica) as run, dial(run) as client:
        await send(client, generate=False, stream_id="a")
        messages = await answer(client)
        assert types(messages) == ["response.created", "response.completed"]
        last = EVENTS.validate_python(messages[-1]).response
        assert (last.status, last.output, last.incomplete_details) == ("completed", [], None)
        assert last.usage.input_tokens == 100
        assert replica.requests[0].json == {
            "model": "m",
            "input": "hi",
            "stream": True,
            "store": False,
            "max_output_tokens": 16,
        }
        assert counted(await run.metrics(), "prompt_tokens_total") == 100
        await send(client, generate=True)
        assert types(await answer(client))[:-1] == NAMES[:-1]
        assert "generate" not in replica.requests[1].json


@pytest.mark.parametrize(
    "refusal",
    [
        status(404, "Response with id 'resp_9' not found."),
        status(410, "It has expired."),
        status(400, "previous_response_id is not supported."),
    ],
)
async def test_a_response_that_no_replica_has(refusal: Behaviour) -> None:
    """The code is OpenAI's, at which clients such as Codex send the whole conversation again."""
    async with FakeReplica(script=[refusal]) as replica, running(replica) as run, dial(run) as client:
        await send(client, previous_response_id="resp_9")
        assert (await receive(client))["error"]["code"] == "previous_response_not_found"
        await send(client)
        assert (await receive(client))["error"]["code"] in (404, 410, 400)


async def test_a_replica_that_dies_before_its_first_token_is_not_noticed() -> None:
    async with FakeReplica(script=[dies]) as one, FakeReplica(script=[WHOLE]) as two, running(one, two) as run:
        async with dial(run) as client:
            for _ in range(4):
                await send(client)
                assert types(await answer(client)) == NAMES
        assert len(one.requests) > 0


@pytest.mark.parametrize("last", [b"", b'event: response.output_text.delta\ndata: {"type": "resp'])
async def test_a_stream_that_breaks_off_ends_with_an_error(last: bytes) -> None:
    """Of an event that is not whole nothing goes to the client, and the connection goes on."""
    script = [events(CREATED, DELTA, last, end=b"") if last else events(CREATED, DELTA, end=b""), WHOLE]
    async with FakeReplica(script=script) as replica, running(replica) as run, dial(run) as client:
        await send(client)
        messages = await answer(client)
        assert types(messages) == [*NAMES[:-1], "error"]
        assert messages[-1]["error"]["code"] == "replica_failed"
        await send(client)
        assert types(await answer(client)) == NAMES


async def test_lanes_run_side_by_side_and_each_in_order() -> None:
    hold = asyncio.Event()
    script = [events(CREATED, DELTA, COMPLETED, then=hold, end=b"0\r\n\r\n")]

    async with FakeReplica(script=script) as replica, running(replica) as run, dial(run) as client:
        for number in range(3):
            await send(client, stream_id="a", input=f"a{number}")
            await send(client, stream_id="b", input=f"b{number}")
            await send(client, input=f"-{number}")
        await eventually(lambda: len(replica.requests) == 3)
        for _ in range(3 * len(NAMES)):
            assert (await receive(client)).get("stream_id") in ("a", "b", None)
        assert {request.json["input"] for request in replica.requests} == {"a0", "b0", "-0"}
        hold.set()
        for _ in range(6 * len(NAMES)):
            await receive(client)
        asked = [request.json["input"] for request in replica.requests]
        assert len(asked) == 9
        for lane in "ab-":
            assert [one for one in asked if one[0] == lane] == [f"{lane}{number}" for number in range(3)]


async def test_there_are_only_so_many_lanes() -> None:
    hold = asyncio.Event()
    async with FakeReplica(script=[events(CREATED, DELTA, COMPLETED, then=hold)]) as replica, running(replica) as run:
        async with dial(run) as client:
            for number in range(MAX_LANES + 1):
                await send(client, stream_id=str(number))
            refused = [
                message for _ in range(MAX_LANES * len(NAMES) + 1) if (message := await receive(client))["type"] == "error"
            ]
            assert [(message["status"], message["error"]["code"]) for message in refused] == [(429, "too_many_messages")]
            assert refused[0]["headers"]["retry-after"] == "1"
            hold.set()
            await eventually(lambda: not run.gateway.router.ledger.open_leases)
            await send(client, stream_id="new")
            assert types(await answer(client)) == NAMES
        await nothing_held(run)


@pytest.mark.parametrize("count", [1_000, 10_000])
@gate("1000", reason="the same messages, a tenth of them")
async def test_many_messages_at_once(count: int) -> None:
    """Those that may wait are answered in their order; all others are refused at once."""
    hold = asyncio.Event()
    async with FakeReplica(script=[events(CREATED, DELTA, COMPLETED, then=hold)]) as replica, running(replica) as run:
        async with dial(run, max_queue=None) as client:
            sending = asyncio.create_task(_send_all(client, count))
            refused = 0
            for _ in range(count - MAX_QUEUED - 1 + len(NAMES)):
                message = await receive(client)
                refused += message["type"] == "error" and message["status"] == 429
            await sending
            assert refused == count - MAX_QUEUED - 1
            assert len(replica.requests) == 1
            hold.set()
            for _ in range(MAX_QUEUED):
                assert types(await answer(client)) == NAMES
            asked = [request.json["input"] for request in replica.requests]
            assert asked == [str(number) for number in range(MAX_QUEUED + 1)]
        await nothing_held(run)


async def _send_all(client: ClientConnection, count: int) -> None:
    for number in range(count):
        await send(client, input=str(number))


async def test_a_message_of_the_largest_size() -> None:
    """And one that is a byte longer, which closes the connection."""
    async with FakeReplica(script=[WHOLE]) as replica, running(replica, limits={"body_mb": 2, "drain_timeout_s": 1}) as run:
        async with dial(run) as client:
            frame = json.dumps({**CREATE, "input": ""})
            text = "x" * ((2 << 20) - len(frame))
            await send(client, input=text)
            assert types(await answer(client)) == NAMES
            assert replica.requests[0].json["input"] == text
            await send(client, input=text + "x")
            assert (await closed(client))[0] == 1009
        await nothing_held(run)


async def test_a_message_for_which_there_is_no_room() -> None:
    """It is read to its end, and answered with an error; the connection goes on."""
    async with FakeReplica(script=[WHOLE]) as replica, running(replica, limits={"inflight_mb": 2, "body_mb": 1}) as run:
        async with dial(run) as client:
            budget = run.gateway.served.memory
            others = budget.lease("another client")
            assert others.grow(budget.largest - (100 << 10))
            await send(client, input="x" * (1 << 19))
            error = await receive(client)
            assert (error["status"], error["error"]["code"]) in ((413, "request_too_large"), (503, "gateway_overloaded"))
            others.close()
            await send(client)
            assert types(await answer(client)) == NAMES
        await nothing_held(run)


async def test_a_client_that_leaves_cancels_its_requests(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    hold = asyncio.Event()
    async with FakeReplica(script=[events(CREATED, DELTA, then=hold)]) as replica, running(replica) as run:
        client = await dial(run)
        await send(client, stream_id="a")
        await send(client, stream_id="b")
        await send(client, stream_id="b")
        for _ in range(2 * 4):
            await receive(client)
        client.transport.abort()
        await eventually(lambda: replica.gone == 2)
        await nothing_held(run)
        assert len(replica.requests) == 2
        await eventually(lambda: not run.gateway.served.running._running)
    assert [line["status"] for line in request_lines()] == [499, 499]


async def test_a_client_that_closes_in_mid_answer_gets_its_close_back() -> None:
    hold = asyncio.Event()
    async with FakeReplica(script=[events(CREATED, DELTA, then=hold)]) as replica, running(replica) as run:
        async with dial(run) as client:
            await send(client)
            await receive(client)
            await client.close(4000, "enough")
            assert client.close_code == 4000
        await eventually(lambda: replica.gone == 1)
        await nothing_held(run)


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\x81\x02hi", 1002), (masked(2, b"x"), 1003), (masked(1, b"\xff"), 1007), (b"\x81\xff" + b"\xff" * 12, 1009)],
    ids=["unmasked", "binary", "no text", "too long"],  # the masks are random
)
async def test_what_breaks_a_rule_closes_the_connection(data: bytes, code: int) -> None:
    async with FakeReplica() as replica, running(replica) as run, dial(run) as client:
        client.transport.write(data)
        assert (await closed(client))[0] == code
        await nothing_held(run)


async def test_half_a_frame_and_then_the_end() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        client = await dial(run)
        client.transport.write(masked(1, b"x" * 1000)[:500])
        await eventually(lambda: run.gateway.served.memory.held >= 400)
        client.transport.abort()
        await nothing_held(run)


async def test_pings_are_answered_and_very_many_do_no_harm() -> None:
    async with FakeReplica(script=[WHOLE]) as replica, running(replica) as run, dial(run, ping_interval=None) as client:
        async with asyncio.timeout(20):
            await (await client.ping(b"here"))
        client.transport.write(masked(9, b"") * 200_000)
        await send(client)
        assert types(await answer(client)) == NAMES


async def test_a_client_that_does_not_read_holds_its_replica_back() -> None:
    """And is dropped after a while; what waits for it is bounded."""
    block = b"data: " + json.dumps({"type": "x", "text": "y" * 60_000}).encode() + b"\n\n"
    sent = 0

    async def floods(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        while True:
            writer.write(block)
            await writer.drain()
            sent += len(block)

    async with FakeReplica(script=[floods]) as replica, running(replica, timeouts={"idle_s": 1}) as run:
        client = await raw_socket(run)
        client.sendall(masked(1, json.dumps(CREATE).encode()))
        await eventually(lambda: sent and run.gateway.served.connections.open == 0)
        assert sent < 64 << 20
        client.close()
        await nothing_held(run)


async def raw_socket(run: Running, **headers: str) -> socket.socket:
    """A connection whose handshake is over, that nobody reads."""
    host, _, port = run.url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, handshake(run, **headers))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await loop.sock_recv(client, 1)
    assert head.startswith(b"HTTP/1.1 101 ")
    client.setblocking(True)
    return client


def handshake(run: Running, **headers: str) -> bytes:
    fields = {
        "Host": run.url.removeprefix("http://"),
        "Connection": "keep-alive, Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}" for name, value in fields.items() if value]
    return "\r\n".join(["GET /v1/responses HTTP/1.1", *lines, "", ""]).encode()


async def exchange(run: Running, data: bytes) -> tuple[int, bytes]:
    """The status and the whole head of what is answered."""
    host, _, port = run.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), head


async def test_the_handshake() -> None:
    async with FakeReplica() as replica, running(replica, cors_origins=["https://good.example"]) as run:
        status_, head = await exchange(run, handshake(run))
        assert status_ == 101
        assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in head  # RFC 6455's own example
        assert b"Sec-WebSocket-Extensions" not in head
        status_, head = await exchange(run, handshake(run, Sec_WebSocket_Version="8"))
        assert (status_, b"Sec-WebSocket-Version: 13\r\n" in head) == (426, True)
        assert (await exchange(run, handshake(run, Sec_WebSocket_Key="short")))[0] == 400
        assert (await exchange(run, handshake(run, Sec_WebSocket_Key="")))[0] == 400
        assert (await exchange(run, handshake(run, Upgrade="")))[0] == 405
        assert (await exchange(run, handshake(run).replace(b"GET /v1/responses", b"GET /v1/responses/x")))[0] != 101
        assert (await exchange(run, handshake(run, Origin="https://good.example")))[0] == 101
        assert (await exchange(run, handshake(run, Origin="https://evil.example")))[0] == 403
        offered = handshake(run, Sec_WebSocket_Protocol="openai-insecure-api-key.k, realtime")
        assert b"\r\nSec-WebSocket-Protocol: realtime\r\n" in (await exchange(run, offered))[1]
        early = handshake(run) + masked(1, b"{}")
        assert (await exchange(run, early))[0] == 400
        for framing in ({"Content_Length": "9"}, {"Transfer_Encoding": "chunked"}):  # its body would be read as messages
            assert (await exchange(run, handshake(run, **framing)))[0] == 400
        await nothing_held(run)


async def test_web_pages_are_refused_by_default() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        with pytest.raises(InvalidStatus, match="403"):
            await dial(run, origin=run.url)


async def test_a_head_that_comes_in_pieces() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        host, _, port = run.url.removeprefix("http://").partition(":")
        head = handshake(run)
        for cut in (-1, -3, -40):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head[:cut])
            await eventually(lambda: run.gateway.served.connections.open == 1)
            await asyncio.sleep(0.05)  # no event tells that a part was read
            writer.write(head[cut:])
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            writer.close()
            await nothing_held(run)


async def test_an_idle_connection_is_closed() -> None:
    """While nothing runs, and after that."""
    hold = asyncio.Event()
    script = [events(CREATED, DELTA, COMPLETED, then=hold)]
    async with FakeReplica(script=script) as replica, running(replica, limits={"client_idle_s": 0.4}) as run:
        async with dial(run) as client:
            assert await closed(client) == (1000, "idle for 0.4 s")
        async with dial(run, ping_interval=None) as client:
            await send(client)
            assert types(await answer(client)) == NAMES
            async with asyncio.timeout(20):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.recv(), 1.0)  # it runs still, and is pinged
            hold.set()
            assert await closed(client) == (1000, "idle for 0.4 s")


async def test_a_message_that_takes_too_long() -> None:
    limits = {"body_s": 0.3, "client_idle_s": 0.8}
    async with FakeReplica() as replica, running(replica, limits=limits) as run, dial(run, ping_interval=None) as client:
        client.transport.write(masked(1, b"{", fin=False))
        leaving = asyncio.create_task(closed(client))
        while not leaving.done():
            await asyncio.wait([leaving], timeout=0.05)
            if client.state is State.OPEN:
                client.transport.write(masked(0, b" ", fin=False))
        assert await leaving == (1008, "a message took longer than 0.3 s")


async def test_a_dead_client_is_dropped_while_its_request_runs() -> None:
    """It answers no ping: its machine is gone, or frozen."""
    hold = asyncio.Event()
    config: dict[str, Any] = {"limits": {"client_idle_s": 0.2}, "timeouts": {"idle_s": 0.5}}
    async with FakeReplica(script=[quiet(hold)]) as replica, running(replica, **config, first_probes_s=1) as run:
        client = await raw_socket(run)
        client.sendall(masked(1, json.dumps(CREATE).encode()))
        await eventually(lambda: replica.gone == 1)
        await nothing_held(run)
        client.close()


def quiet(hold: asyncio.Event) -> Behaviour:
    """A stream of which only comments come, until the event."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + CREATED + DELTA)
        while not hold.is_set():
            writer.write(b": alive\n\n")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hold.wait(), 0.1)

    return behave


async def test_a_gateway_that_goes_down() -> None:
    """Idle connections are closed at once; what runs, and what waits behind it, ends before."""
    hold = asyncio.Event()
    script = [events(CREATED, DELTA, COMPLETED, then=hold), WHOLE]
    async with FakeReplica(script=script) as replica, running(replica) as run, dial(run) as idle, dial(run) as busy:
        await send(busy, stream_id="a")
        await send(busy, stream_id="a", input="second")
        await receive(busy)
        await send(busy, stream_id="b")  # so that the second is in its lane
        await eventually(lambda: len(replica.requests) == 2)
        over = asyncio.create_task(run.gateway.served.running.wait(30, asyncio.Event()))
        assert await closed(idle) == (1001, "the gateway is shutting down")
        await send(busy, stream_id="c")
        found = [await receive(busy) for _ in range(2 * len(NAMES))]
        assert [(one["stream_id"], one["status"]) for one in found if one["type"] == "error"] == [("c", 503)]
        hold.set()
        rest = [await receive(busy) for _ in range(len(NAMES))]
        assert [one["stream_id"] for one in rest] == ["a"] * len(NAMES)
        assert await closed(busy) == (1001, "the gateway is shutting down")
        await over
        assert len(replica.requests) == 3
        with pytest.raises(InvalidStatus, match="503"):
            await dial(run)


async def test_the_end_of_the_drain_time() -> None:
    """What still runs is ended with an error, what waits is refused, and the connection is closed."""
    hold = asyncio.Event()
    async with FakeReplica(script=[events(CREATED, DELTA, then=hold)]) as replica, running(replica) as run, dial(run) as client:
        await send(client)
        await send(client)
        await receive(client)
        hurry = asyncio.Event()
        over = asyncio.create_task(run.gateway.served.running.wait(30, hurry))
        await eventually(lambda: run.gateway.served.running.draining)
        hurry.set()
        found = [await receive(client) for _ in range(3 + 2)]
        assert [one["error"]["code"] for one in found if one["type"] == "error"] == ["shutting_down", "shutting_down"]
        assert (await closed(client))[0] == 1001
        await over
        assert len(replica.requests) == 1


async def test_a_message_can_be_of_very_many_frames() -> None:
    """Byte by byte, which costs what the bytes cost."""
    async with FakeReplica(script=[WHOLE]) as replica, running(replica) as run, dial(run) as client:
        text = json.dumps({**CREATE, "input": "x" * 50_000}).encode()
        frames = [masked(0 if at else 1, text[at : at + 1], fin=at == len(text) - 1) for at in range(len(text))]
        client.transport.write(b"".join(frames))
        assert types(await answer(client)) == NAMES


async def test_a_close_frame_without_a_code() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        client = await raw_socket(run)
        client.sendall(masked(8, b""))
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        assert await loop.sock_recv(client, 100) == b"\x88\x00"
        assert await loop.sock_recv(client, 100) == b""
        client.close()
        client = await raw_socket(run)
        client.sendall(masked(8, struct.pack(">H", 1000)))
        client.setblocking(False)
        assert await loop.sock_recv(client, 100) == b"\x88\x02\x03\xe8"
        client.close()
