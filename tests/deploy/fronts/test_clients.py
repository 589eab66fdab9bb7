"""The official clients over HTTPS and HTTP/2 through real fronts: they get what they would get from a gateway itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import h2.connection
import h2.errors
import h2.events
import httpx2
import openai
import pytest
import websockets

from tests.clients.sdk.engines import engine
from tests.deploy.fronts.stage import FRONTS, Gateways, front, gateways_of
from tests.gateway.conftest import eventually
from tests.support.fakes import Behaviour, FakeReplica, answers, status, streams
from tests.support.tiers import gate
from tests.support.tools import tool

pytestmark = [pytest.mark.tools, gate("nginx", reason="the configuration of each front: the first test below")]

MIB = 1 << 20
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@dataclass(frozen=True, slots=True)
class Through:
    """A front over one gateway, and that gateway itself."""

    url: str
    direct: str
    trusted: ssl.SSLContext
    gateways: Gateways

    def transport(self, http2: bool) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(http2=http2, verify=self.trusted, timeout=120)

    def openai(self, url: str = "", *, http2: bool = True) -> openai.AsyncOpenAI:
        base, transport = f"{url or self.url}/v1", self.transport(http2)
        return openai.AsyncOpenAI(base_url=base, api_key="k", max_retries=0, http_client=transport)

    def anthropic(self, url: str = "", *, http2: bool = True) -> anthropic.AsyncAnthropic:
        base, transport = url or self.url, self.transport(http2)
        return anthropic.AsyncAnthropic(base_url=base, api_key="k", max_retries=0, http_client=transport)


@contextlib.asynccontextmanager
async def through(name: str, folder: Path, chats: Mapping[str, Behaviour]) -> AsyncIterator[tuple[Through, FakeReplica]]:
    """Over a replica that knows chat only: Messages are translated by the gateway."""
    async with (
        engine(chats) as replica,
        gateways_of(folder, [replica.url], 1) as gateways,
        front(name, gateways.ports, folder) as (url, tls),
    ):
        yield Through(url, f"http://127.0.0.1:{gateways.ports[0]}", tls.trusted(), gateways), replica


@pytest.fixture(params=FRONTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@gate("*", reason="all")
async def test_answers_and_streams_arrive_as_they_are_made(name: str, tmp_path: Path) -> None:
    holds = [asyncio.Event(), asyncio.Event()]
    waiting = iter(holds)

    async def held(request: Any, writer: asyncio.StreamWriter) -> None:
        await streams("one", "two", "three", hold=next(waiting))(request, writer)

    async with through(name, tmp_path, {"chat": answers("hello"), "chat_stream": held}) as (at, _):
        async with at.openai() as client:
            whole = await client.chat.completions.with_raw_response.create(**CHAT)
            assert whole.http_response.http_version == "HTTP/2"
            assert whole.parse().choices[0].message.content == "hello"
            stream = await client.chat.completions.create(**CHAT, stream=True)
            assert stream.response.http_version == "HTTP/2"
            texts = (chunk.choices[0].delta.content async for chunk in stream if chunk.choices)
            assert await anext(texts) == "one", "before the replica has made the rest"
            holds[0].set()
            assert [text async for text in texts] == ["two", "three"]
        async with at.anthropic() as other:
            message = await other.messages.create(**CHAT)
            assert [block.type for block in message.content] == ["text"]
            async with other.messages.stream(**CHAT) as events:
                said = aiter(events.text_stream)
                assert await anext(said) == "one"
                holds[1].set()
                assert [text async for text in said] == ["two", "three"]


async def test_a_client_that_leaves_in_mid_stream_ends_the_replicas_work(name: str, tmp_path: Path) -> None:
    """Over HTTP/1.1 and HTTP/2 by closing the connection."""
    never = asyncio.Event()
    async with through(name, tmp_path, {"chat_stream": streams("one", "two", hold=never)}) as (at, replica):
        for http2 in (False, True):
            before = replica.gone
            async with at.openai(http2=http2) as client:
                stream = await client.chat.completions.create(**CHAT, stream=True)
                await anext(aiter(stream))
                await stream.close()
            await eventually(lambda seen=before: replica.gone == seen + 1)
            async with at.anthropic(http2=http2) as other, other.messages.stream(**CHAT) as events:
                await anext(aiter(events.text_stream))
                await events.close()
            await eventually(lambda seen=before: replica.gone == seen + 2)


async def test_a_stream_that_is_reset_ends_the_replicas_work_and_no_other_stream(name: str, tmp_path: Path) -> None:
    """As browsers and Node do (the Python clients' library does not): the connection stays, with its other stream."""
    hold = asyncio.Event()
    async with through(name, tmp_path, {"chat_stream": streams("one", "two", hold=hold)}) as (at, replica):
        async with http2_connection(at) as connection:
            left, kept = connection.post(CHAT | {"stream": True}), connection.post(CHAT | {"stream": True})
            await connection.until(left, b'"one"')
            await connection.until(kept, b'"one"')
            connection.reset(left)
            await eventually(lambda: replica.gone == 1)
            hold.set()
            await connection.until(kept, b"[DONE]")
        assert replica.gone == 1


class Http2Connection:
    """One of a client that resets streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._state = h2.connection.H2Connection()
        self._state.initiate_connection()
        self._data: dict[int, bytes] = {}

    def post(self, body: Mapping[str, Any]) -> int:
        """The stream's number."""
        stream, data = self._state.get_next_available_stream_id(), json.dumps(body).encode()
        head = {":method": "POST", ":scheme": "https", ":authority": "localhost", ":path": "/v1/chat/completions"}
        fields = {"content-type": "application/json", "content-length": str(len(data))}
        self._state.send_headers(stream, [*head.items(), *fields.items()])
        self._state.send_data(stream, data, end_stream=True)
        self._data[stream] = b""
        self._writer.write(self._state.data_to_send())
        return stream

    def reset(self, stream: int) -> None:
        self._state.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        self._writer.write(self._state.data_to_send())

    async def until(self, stream: int, text: bytes) -> None:
        async with asyncio.timeout(60):
            while text not in self._data[stream]:
                for event in self._state.receive_data(await self._reader.read(65_536)):
                    if isinstance(event, h2.events.DataReceived):
                        self._data[event.stream_id] += event.data
                        self._state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._writer.write(self._state.data_to_send())


@contextlib.asynccontextmanager
async def http2_connection(at: Through) -> AsyncIterator[Http2Connection]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = at.url.removeprefix("https://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    try:
        yield Http2Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()


@contextlib.contextmanager
def refused() -> Iterator[list[tuple[type, int, Any]]]:
    """The class, status and body that the clients raise, without what differs in each request."""
    found: list[tuple[type, int, Any]] = []
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as raised:
        yield found
    error: Any = raised.value
    body = json.loads(error.response.text)
    body.pop("request_id", None)
    text = json.dumps(body).replace(error.response.headers.get("x-request-id", "?"), "ID")
    found.append((type(error), error.status_code, json.loads(text)))


async def test_errors_are_those_of_the_gateway(name: str, tmp_path: Path) -> None:
    refusal = status(400, "too long")
    async with through(name, tmp_path, {"chat": refusal}) as (at, _), contextlib.AsyncExitStack() as stack:
        found: dict[str, list[Any]] = {}
        for url in (at.direct, at.url):
            client = await stack.enter_async_context(at.openai(url))
            other = await stack.enter_async_context(at.anthropic(url))
            found[url] = []
            for body in (CHAT, {**CHAT, "model": "unknown"}, {**CHAT, "model": 3}):
                with refused() as one:
                    await client.chat.completions.create(**body)
                with refused() as two:
                    await other.messages.create(**body)
                found[url] += one + two
        assert len(found[at.url]) == 6
        assert found[at.url] == found[at.direct]


async def test_a_stream_that_breaks_off_is_raised(name: str, tmp_path: Path) -> None:
    chats = {"chat_stream": streams("one", "two", die=True)}
    async with through(name, tmp_path, chats) as (at, _), at.openai() as client, at.anthropic() as other:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APIError):
            async for _chunk in stream:
                pass
        with pytest.raises(anthropic.APIError):
            async with other.messages.stream(**CHAT) as events:
                await events.until_done()


async def test_large_bodies(name: str, tmp_path: Path) -> None:
    """limits.body_mb is 64: what fits arrives whole, and what does not is an error that says so, over HTTP/1.1 and HTTP/2."""
    async with through(name, tmp_path, {"chat": answers("read")}) as (at, replica):
        async with at.openai() as client:
            fits = {**CHAT, "messages": [{"role": "user", "content": "a " * (31 * MIB)}]}
            answer = await client.chat.completions.create(**fits)
            assert answer.choices[0].message.content == "read"
            assert len(replica.requests[-1].body) > 62 * MIB
        async with at.openai(http2=False) as client, at.anthropic(http2=False) as other:
            larger = {**CHAT, "messages": [{"role": "user", "content": "a " * (33 * MIB)}]}
            for call in (client.chat.completions.create, other.messages.create):
                if name == "envoy":  # it cuts the connection while the body is sent, and the answer may be lost
                    with pytest.raises((openai.APIError, anthropic.APIError)):
                        await call(**larger)
                    continue
                with refused() as found:
                    await call(**larger)
                ((_, code, body),) = found
                assert code == 413
                assert "larger than" in body["error"]["message"], body
            assert (await client.chat.completions.create(**CHAT)).choices[0].message.content == "read", "nothing is left of it"
        file = tmp_path / "larger.json"
        file.write_bytes(json.dumps(larger).encode())
        code, answer = await asyncio.to_thread(curl, at, file)
        if name == "envoy":
            assert len(replica.requests) == 2, "the two that fit"
        else:
            assert code == "2 413"
            assert "larger than" in json.loads(answer)["error"]["message"]


def curl(at: Through, file: Path) -> tuple[str, str]:
    """(version of HTTP and status, body)."""
    program = str(tool("curl"))
    out = file.with_suffix(".answer")
    out.touch()
    show = ["-s", "-o", str(out), "-w", "%{http_version} %{http_code}", "--cacert", str(file.parent / "tls.crt"), "--http2"]
    send = ["-H", "Content-Type: application/json", "--data-binary", f"@{file}", f"{at.url}/v1/chat/completions"]
    done = subprocess.run([program, *show, *send], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, out.read_text("utf-8")


async def test_websockets_pass(name: str, tmp_path: Path) -> None:
    """Over HTTP/1.1 of the same port; the gateway answers them."""
    async with through(name, tmp_path, {}) as (at, _):
        url = at.url.replace("https:", "wss:") + "/v1/responses"
        async with websockets.connect(url, ssl=at.trusted, additional_headers={"Session-Id": "s"}) as socket:
            await socket.send('{"type": "response.create", "model": 3}')
            event = json.loads(await asyncio.wait_for(socket.recv(), 60))
            assert event["type"] == "error", event


async def test_old_tls_is_refused(name: str, tmp_path: Path) -> None:
    async with through(name, tmp_path, {}) as (at, _):
        for version, works in ((ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True), (ssl.TLSVersion.TLSv1_1, False)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_ciphers("DEFAULT@SECLEVEL=0")  # this side would still speak the old one
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                context.minimum_version = context.maximum_version = version
            host, _, port = at.url.removeprefix("https://").partition(":")
            try:
                _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            except (ssl.SSLError, ConnectionError):
                assert not works
            else:
                assert works
                writer.close()
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    await writer.wait_closed()
