"""The listeners beside the clients' one: where they are, and what they do when they cannot be there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import compose, serve
from gateway.cluster.side_sockets import ListenError, SideSockets, side_sockets
from gateway.config.schema import ADMIN_PORT_OFFSET, Config
from gateway.server.endpoints import SIDE_CONNECTIONS
from tests.gateway.conftest import BODY, LOGGED
from tests.support.configs import load
from tests.support.fakes import FakeReplica


def config_of(*replicas: str, **raw: Any) -> Config:
    pools = [{"replicas": list(replicas) or ["http://127.0.0.1:9"]}]
    return load(None, {"pools": pools, "listen": "127.0.0.1:0", **raw}, env={})


@contextlib.contextmanager
def listening(port: int = 0) -> Any:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        yield taken.getsockname()[1]


def free_port() -> int:
    """One that is free, and so is the default of an admin listener above it."""
    chance = random.SystemRandom()
    for _ in range(100):  # below those that the kernel gives to whoever asks for any
        port = chance.randrange(20_000, 22_000)
        with contextlib.suppress(OSError), listening(port), listening(port + ADMIN_PORT_OFFSET):
            return port
    raise AssertionError("no port is free")


def test_by_default_operators_are_answered_on_loopback_at_a_port_of_their_own() -> None:
    port = free_port()
    with side_sockets(config_of(listen=f"0.0.0.0:{port}")) as sides:
        assert sides.urls == {"admin_url": f"http://127.0.0.1:{port + ADMIN_PORT_OFFSET}"}


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.1:65000"])
def test_without_such_a_port_it_is_any_free_one(listen: str) -> None:
    with side_sockets(config_of(listen=listen)) as sides:
        assert sides.urls["admin_url"].startswith("http://127.0.0.1:")


def test_the_port_of_a_replica_that_is_still_to_start_is_left_alone() -> None:
    port = free_port()
    with side_sockets(config_of(f"http://localhost:{port + ADMIN_PORT_OFFSET}", listen=f"127.0.0.1:{port}")) as sides:
        assert sides.urls["admin_url"] != f"http://127.0.0.1:{port + ADMIN_PORT_OFFSET}"


def test_a_default_address_that_is_taken_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with listening(port + ADMIN_PORT_OFFSET), side_sockets(config_of(listen=f"127.0.0.1:{port}")) as sides:
        assert sides.urls == {}
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.WARNING, "no operator endpoints: set admin_listen")
    assert f"127.0.0.1:{port + ADMIN_PORT_OFFSET} (admin_listen)" in record.__dict__["error"]


@pytest.mark.parametrize("key", ["admin_listen", "metrics_listen"])
def test_an_address_that_was_asked_for_and_is_taken_is_an_error(key: str) -> None:
    with (
        listening() as port,
        pytest.raises(ListenError, match=rf"cannot listen on 127.0.0.1:{port} \({key}\): .*in use"),
        side_sockets(config_of(**{key: f"127.0.0.1:{port}"})),
    ):
        pass


def test_off_is_off() -> None:
    with side_sockets(config_of(admin_listen="off")) as sides:
        assert list(sides) == []


def test_a_unix_socket_is_for_the_gateways_user_and_group_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with side_sockets(config_of(admin_listen=f"unix:{path}")) as sides:
        assert sides.urls == {"admin_url": f"unix:{path}"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(ListenError, match="in use"), side_sockets(config_of(admin_listen=f"unix:{path}")):
            pass
        assert path.exists(), "the second one has not taken it away"
    assert not path.exists()


def test_the_file_of_a_gateway_that_was_killed_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path, other = tmp_path / "admin.sock", tmp_path / "precious"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    with side_sockets(config_of(admin_listen=f"unix:{path}")), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    other.write_text("data")
    with pytest.raises(ListenError), side_sockets(config_of(admin_listen=f"unix:{other}")):
        pass
    assert other.read_text() == "data"


@contextlib.asynccontextmanager
async def gateway(config: Config) -> AsyncIterator[tuple[str, SideSockets]]:
    """(the clients' URL, the other sockets) of a gateway that serves on all its listeners."""
    stop, hurry, started = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
    with side_sockets(config) as sides:
        over = asyncio.create_task(serve(compose(config, LOGGED), stop, hurry, started.set_result, sides=sides))
        try:
            await asyncio.wait([over, started], return_when=asyncio.FIRST_COMPLETED)
            yield started.result(), sides
        finally:
            stop.set()
            hurry.set()
            await over


async def test_prometheus_has_a_listener_for_itself(tmp_path: Path) -> None:
    async with FakeReplica() as one:
        config = config_of(one.url, metrics_listen="127.0.0.1:0")
        async with gateway(config) as (_, sides), aiohttp.ClientSession() as session:
            url = sides.urls["metrics_url"]
            for headers in ({}, {"Host": "10.1.2.3:8002", "X-Forwarded-For": "10.9.9.9"}):
                for path, code in (("/metrics", 200), ("/health", 200), ("/ready", 200), ("/warmroute/replicas", 404)):
                    async with session.get(url + path, headers=headers) as answer:
                        assert (answer.status, path) == (code, path)
            async with session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
                assert answer.status == 404
            assert not one.requests


async def test_operators_are_answered_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    async with (
        FakeReplica() as one,
        gateway(config_of(one.url, admin_listen=f"unix:{path}")),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
    ):
        async with session.get("http://localhost/warmroute/replicas") as answer:
            assert [row["name"] for row in (await answer.json())["replicas"]] == [one.name]
        async with session.get("http://evil.example/warmroute/replicas") as answer:
            assert answer.status == 403


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"])
@pytest.mark.parametrize("name", ["admin", "metrics"])
async def test_idle_connections_make_room_beside_the_clients_port(name: str, sent: bytes) -> None:
    config = config_of("http://127.0.0.1:9", metrics_listen="127.0.0.1:0")
    async with gateway(config) as (_, sides):
        address = getattr(sides, name)[0].getsockname()
        ends = []
        for _ in range(SIDE_CONNECTIONS + 20):
            ends.append(await asyncio.open_connection(*address))
            ends[-1][1].write(sent)
            if sent.endswith(b"\r\n"):
                assert b" 200 " in await ends[-1][0].readline()
        for _ in range(3):
            async with aiohttp.ClientSession() as session, session.get(f"http://{address[0]}:{address[1]}/metrics") as answer:
                assert answer.status == 200
        with contextlib.suppress(ConnectionError):  # the oldest went
            await asyncio.wait_for(ends[0][0].read(), 10)
        reader, writer = ends[-1]
        writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"[len(sent) if not sent.endswith(b"\n") else 0 :])
        await reader.readuntil(b"HTTP/1.1 200")  # the newest is still open
        for _, writer in ends:
            writer.close()


async def test_connections_to_the_admin_listener_are_bounded() -> None:
    """Those on which a request is being answered are not closed for others."""
    async with FakeReplica() as one, gateway(config_of(one.url)) as (_, sides):
        address = sides.admin[0].getsockname()
        ends = []
        for _ in range(SIDE_CONNECTIONS):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(
                b"POST /warmroute/route HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
            )
            ends.append((await reader.readline(), writer))
        lines = [line for line, _ in ends]
        assert lines.count(b"HTTP/1.1 100 Continue\r\n") >= 0.8 * SIDE_CONNECTIONS
        assert b" 503 " in lines[-1]
        for _, writer in ends:
            writer.close()
