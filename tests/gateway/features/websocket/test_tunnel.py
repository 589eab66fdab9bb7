"""/v1/realtime through a whole gateway: clients and replicas are `websockets`, and the official client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response

from gateway.features.websocket.tunnel import SHARE
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.websocket.test_responses_socket import (
    closed,
    exchange,
    handshake,
    nothing_held,
)
from tests.support.fakes import Behaviour, FakeReplica, dies, status

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "fake"}]}).encode()
Session = Callable[[ServerConnection], Awaitable[None]]


class RealtimeReplica:
    """A replica with one endpoint. seen: the requests for an upgrade."""

    def __init__(self, session: Session, **options: Any) -> None:
        self._session = session
        self._options = options
        self.seen = list[Request]()
        self.url = ""

    def _process(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path.startswith("/v1/realtime"):
            self.seen.append(request)
            return None
        found = request.path == "/v1/models"
        return connection.respond(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND, MODELS.decode() if found else "no")

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[RealtimeReplica]:
        async with serve(self._session, "127.0.0.1", 0, process_request=self._process, **self._options) as server:
            self.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            yield self


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


def dial(run: Running, query: str = "?model=m", **options: Any) -> connect:
    return connect(run.url.replace("http", "ws") + "/v1/realtime" + query, proxy=None, **options)


async def test_what_is_said_passes_both_ways(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    """Texts and bytes, not compressed; one line in the log, one lease, closed at the end."""
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine", "X-Warmroute-Admin-Key": "secret"}
    async with RealtimeReplica(echo, subprotocols=["realtime"]).up() as replica, running(replica.url) as run:
        async with dial(run, additional_headers=headers, subprotocols=["realtime"]) as client:
            assert client.subprotocol == "realtime"
            assert client.response
            assert client.response.headers["X-Request-Id"] == "mine"
            assert "Sec-WebSocket-Extensions" not in client.response.headers
            assert run.gateway.router.ledger.open_leases == 1
            for message in ("hello", b"\x00\xff", "x" * 1_000_000, ""):
                await client.send(message)
                assert await client.recv() == message
            async with asyncio.timeout(10):
                await (await client.ping())
        assert client.close_code == 1000
        await nothing_held(run)
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        (seen,) = replica.seen
        assert seen.path == "/v1/realtime?model=m"
        assert seen.headers["Authorization"] == "Bearer k"
        assert "X-Warmroute-Via" in seen.headers
        assert "X-Warmroute-Admin-Key" not in seen.headers
        metrics = await run.metrics()
        assert metrics['warmroute_requests_total{code="101",endpoint="/v1/realtime",model="m"}'] == 1
    (line,) = request_lines()
    assert (line["path"], line["status"], line["model"], line.get("error")) == ("/v1/realtime", 101, "m", None)


async def test_the_official_client() -> None:
    async def session(connection: ServerConnection) -> None:
        await connection.send('{"type": "session.created", "event_id": "e", "session": {}}')
        async for message in connection:
            assert json.loads(message)["type"] == "response.create"
            await connection.send('{"type": "response.done", "event_id": "e", "response": {}}')

    async with RealtimeReplica(session).up() as replica, running(replica.url) as run:
        async with run.client.realtime.connect(model="m") as client:
            assert (await client.recv()).type == "session.created"
            await client.response.create()
            assert (await client.recv()).type == "response.done"
        assert replica.seen[0].path == "/v1/realtime?model=m"


@pytest.mark.parametrize("bad", [status(503), dies])
async def test_a_handshake_that_fails_is_tried_elsewhere(bad: Behaviour) -> None:
    one, good, turns = FakeReplica(script=[bad]), RealtimeReplica(echo), {"policy": "round_robin"}
    async with one, good.up(), running(one, good.url, routing=turns) as run:
        for _ in range(4):
            async with dial(run) as client:
                await client.send("hello")
                assert await client.recv() == "hello"
        assert len(good.seen) == 4
        assert one.requests
        await nothing_held(run)


async def test_an_engine_without_it_answers_for_itself() -> None:
    async with FakeReplica(script=[status(404, "no such path")]) as replica, running(replica) as run:
        with pytest.raises(InvalidStatus) as refused:
            await dial(run)
        assert refused.value.response.status_code == 404
        assert b"no such path" in refused.value.response.body
        assert replica.requests[0].headers["upgrade"] == "websocket"
        with pytest.raises(InvalidStatus) as refused:
            await dial(run, "?model=other")
        assert b"model_not_found" in refused.value.response.body
        await nothing_held(run)


async def test_a_replica_that_dies_closes_the_connection() -> None:
    """Behind its last whole frame; without one, the connection is cut."""

    async def session(connection: ServerConnection) -> None:
        first = await connection.recv()
        if first == "half":
            connection.transport.write(b"\x81\x05ab")
        await asyncio.sleep(0)
        connection.transport.abort()

    async with RealtimeReplica(session).up() as replica, running(replica.url) as run:
        async with dial(run) as client:
            await client.send("die")
            assert await closed(client) == (1011, "the connection to the replica has ended")
        async with dial(run) as client:
            await client.send("half")
            assert (await closed(client))[0] == 1006
        await nothing_held(run)


async def test_a_replica_that_closes() -> None:
    async def session(connection: ServerConnection) -> None:
        await connection.close(4001, "enough")

    async with RealtimeReplica(session).up() as replica, running(replica.url) as run, dial(run) as client:
        assert await closed(client) == (4001, "enough")
        await nothing_held(run)


async def test_a_client_that_leaves_ends_the_replicas_side(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    ended = asyncio.Event()

    async def session(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            await connection.recv()
        ended.set()

    async with RealtimeReplica(session).up() as replica, running(replica.url) as run:
        client = await dial(run)
        client.transport.abort()
        async with asyncio.timeout(20):
            await ended.wait()
        await nothing_held(run)
    assert [line["status"] for line in request_lines()] == [499]


async def test_nothing_passes_for_too_long() -> None:
    """No fault of the replica's; what a client says counts as well."""
    heard = asyncio.Event()

    async def session(connection: ServerConnection) -> None:
        async for _ in connection:
            heard.set()

    silent = {"idle_s": 0.6}
    replica_ = RealtimeReplica(session, ping_interval=None)
    async with replica_.up() as replica, running(replica.url, timeouts=silent) as run, dial(run, ping_interval=None) as client:
        for _ in range(4):
            await asyncio.sleep(0.3)  # time is what this is about
            await client.send("here")
        assert client.close_code is None
        assert await closed(client) == (1011, "the connection to the replica has ended")
        assert heard.is_set()
        state = run.gateway.fleet.named(replica.url.removeprefix("http://"))
        assert state
        assert state.up
        await nothing_held(run)
        assert "warmroute_broken_responses_total" not in str(await run.metrics())


async def test_a_side_that_does_not_read_holds_the_other_one_back() -> None:
    go, total = asyncio.Event(), 40

    async def session(connection: ServerConnection) -> None:
        await go.wait()
        await echo(connection)

    plain = RealtimeReplica(session, max_size=None, compression=None)
    async with plain.up() as replica, running(replica.url) as run:
        async with dial(run, max_size=None, compression=None, ping_interval=None) as client:
            block = b"x" * (1 << 20)

            async def send_all() -> None:
                for _ in range(total):
                    await client.send(block)

            sending = asyncio.create_task(send_all())
            await eventually(lambda: run.gateway.served.memory.held > 50_000)
            assert not sending.done()
            assert run.gateway.served.memory.held < 2 << 20
            go.set()
            for _ in range(total):
                assert await client.recv() == block
            await sending
        await nothing_held(run)


async def test_a_gateway_that_goes_down() -> None:
    """The session has the drain time; then it is closed."""
    async with RealtimeReplica(echo).up() as replica, running(replica.url) as run, dial(run) as client:
        hurry = asyncio.Event()
        over = asyncio.create_task(run.gateway.served.running.wait(30, hurry))
        await eventually(lambda: run.gateway.served.running.draining)
        await client.send("still here")
        assert await client.recv() == "still here"
        with pytest.raises(InvalidStatus, match="503"):
            await dial(run)
        hurry.set()
        assert await closed(client) == (1001, "the gateway is shutting down")
        await over


async def test_web_pages_and_early_bytes_are_refused() -> None:
    async with RealtimeReplica(echo).up() as replica, running(replica.url) as run:
        asks = handshake(run).replace(b"/v1/responses", b"/v1/realtime?model=m")
        assert (await exchange(run, asks))[0] == 101
        assert (await exchange(run, asks + b"\x81\x80mask"))[0] == 400
        evil = handshake(run, Origin="https://evil.example").replace(b"/v1/responses", b"/v1/realtime?model=m")
        assert (await exchange(run, evil))[0] == 403
        await nothing_held(run)


async def test_pings_are_no_messages() -> None:
    """A session in which only pings pass ends; what the client has asked may take `first_byte_s`."""
    silent = {"idle_s": 0.5, "first_byte_s": 600}
    async with RealtimeReplica(echo).up() as replica, running(replica.url, timeouts=silent) as run:
        async with dial(run, ping_interval=0.1) as client:
            assert await closed(client) == (1000, "no message for 0.5 s")
        await nothing_held(run)
        assert run.gateway.router.ledger.open_leases == 0


async def test_one_client_has_a_share_of_a_pools_sessions() -> None:
    """A quarter; its other requests, and other clients, have the rest."""
    async with RealtimeReplica(echo).up() as replica:
        pool = {"replicas": [replica.url], "max_inflight": 2 * SHARE}
        async with running(pools=[pool]) as run:
            async with dial(run) as first, dial(run):
                with pytest.raises(InvalidStatus, match="429"):
                    await dial(run)
                await first.close()
                await eventually(lambda: run.gateway.router.ledger.open_leases == 1)
                async with dial(run) as third:
                    await third.send("hello")
                    assert await third.recv() == "hello"
            await nothing_held(run)
