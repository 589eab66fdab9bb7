"""Connecting by name: several addresses, some of them dead, and a replica that has moved."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bench.measure.ports import free_port
from gateway.cluster.listeners import open_listeners
from gateway.errors import GatewayError, ReplicaFailure
from gateway.server.http.accept import Acceptor
from gateway.upstream.dialer import REPLICA_LOST_S, Dialer
from gateway.upstream.resolver import RETRY_S, Resolver
from tests.gateway.conftest import eventually
from tests.gateway.upstream.test_resolver import Clock, NameServer
from tests.support.sockets import silence_of
from tests.support.tools import tool

ONE, TWO = "127.77.0.1", "127.77.0.2"  # where no other program listens


class Listener:
    """Accepts connections at addresses of loopback. accepted: at which address, in their order."""

    def __init__(self) -> None:
        self.port = free_port()
        self.accepted: list[str] = []
        self.open = 0
        self._servers: dict[str, Acceptor | asyncio.Server] = {}

    @contextlib.asynccontextmanager
    async def at(self, *hosts: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Listener]:
        while len(self._servers) < len(hosts):
            try:
                for host in hosts:
                    self._servers[host] = await self._listen(host, tls)
            except OSError:  # somebody else has this port at one of the addresses
                for host in list(self._servers):
                    await self.leave(host)
                self.port = free_port()
        try:
            yield self
        finally:
            for host in list(self._servers):
                await self.leave(host)
        await asyncio.sleep(0)  # the tasks of connections that were accepted last begin
        await eventually(lambda: not self.open)

    async def _listen(self, host: str, tls: ssl.SSLContext | None) -> Acceptor | asyncio.Server:
        if tls:
            return await asyncio.start_server(self._serve, host, self.port, ssl=tls)
        (listener,) = open_listeners(host, self.port)  # asyncio's server loses a connection that it has just accepted
        return Acceptor(listener, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.append(writer.get_extra_info("sockname")[0])
        self.open += 1
        with contextlib.suppress(OSError):
            await reader.read()
        self.open -= 1
        writer.transport.abort()

    async def leave(self, host: str) -> None:
        """From now on the address refuses connections."""
        server = self._servers.pop(host)
        server.close()
        await server.wait_closed()


@contextlib.contextmanager
def black_hole(host: str, port: int) -> Iterator[None]:
    """There nobody refuses a connection and none comes about: the listener's queue is full."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((host, port))
        yield


def dialer(port: int, *addresses: str, clock: Clock | None = None) -> tuple[Dialer, NameServer]:
    server = NameServer({"replica.test": list(addresses)})
    return Dialer("replica.test", port, None, Resolver(server.look_up, clock or Clock())), server


async def local_address(dial: Dialer, timeout_s: float = 10) -> str:
    """Of the replica, as a new connection reaches it."""
    connection = await dial.connect(timeout_s)
    try:
        assert connection._transport is not None
        return str(connection._transport.get_extra_info("peername")[0])
    finally:
        connection.abort()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_an_ip_address_is_never_looked_up(host: str) -> None:
    def never(host: str) -> list[str]:
        pytest.fail(f"{host} was looked up")

    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip("no IPv6 here")
    async with Listener().at(host) as listener:
        assert await local_address(Dialer(host, listener.port, None, Resolver(never))) == host


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
async def test_the_system_ends_connections_of_replicas_that_are_gone_without_an_end() -> None:
    """Without it a request waits for a machine without power until `timeouts.first_byte_s`."""
    async with Listener().at(ONE) as listener:
        connection = await Dialer(ONE, listener.port, None, Resolver(lambda host: [])).connect(10)
        assert connection._transport is not None
        assert silence_of(connection._transport.get_extra_info("socket")) == (True, REPLICA_LOST_S)
        connection.abort()


async def test_an_address_that_refuses_is_passed_over_and_comes_last_next_time() -> None:
    async with Listener().at(TWO) as listener:
        dial, server = dialer(listener.port, ONE, TWO)
        for _ in range(3):
            assert await local_address(dial) == TWO
        assert server.asked["replica.test"] == 1


async def test_an_address_that_does_not_answer_costs_a_moment_and_only_once() -> None:
    loop = asyncio.get_running_loop()
    async with Listener().at(TWO) as listener:
        with black_hole(ONE, listener.port):
            dial, _ = dialer(listener.port, ONE, TWO)
            assert await local_address(dial) == TWO
            begun = loop.time()
            for _ in range(20):
                assert await local_address(dial) == TWO
            assert loop.time() - begun < 2.5, "20 times the head start would be 5 s"


async def test_a_guarded_dialer_passes_link_local_addresses_over_also_when_the_name_is_rebound() -> None:
    async with Listener().at(TWO) as listener:
        names = NameServer({"replica.test": ["169.254.169.254", TWO]})
        dial = Dialer("replica.test", listener.port, None, Resolver(names.look_up, clock := Clock()), lambda: True)
        assert await local_address(dial) == TWO
    names.answers["replica.test"] = ["169.254.169.254", "fe80::1%1", "fd00:ec2::254"]
    clock.now += RETRY_S
    with pytest.raises(ReplicaFailure, match=r"fe80::1%1 is link-local or a cloud's metadata service"):
        await dial.connect(10)


async def test_of_several_that_connect_one_is_kept() -> None:
    async with Listener().at(ONE, TWO) as listener:
        dial, _ = dialer(listener.port, ONE, TWO)
        for _ in range(20):
            assert await local_address(dial) == ONE
        await eventually(lambda: len(listener.accepted) >= 20)
        assert set(listener.accepted) == {ONE}


@pytest.mark.parametrize("old", ["refuses", "does not answer"])
async def test_a_replica_that_has_moved_is_found_by_the_same_attempt(old: str) -> None:
    async with Listener().at(ONE, TWO) as listener:
        clock = Clock()
        dial, server = dialer(listener.port, ONE, clock=clock)
        assert await local_address(dial) == ONE
        await listener.leave(ONE)
        with black_hole(ONE, listener.port) if old == "does not answer" else contextlib.nullcontext():
            server.answers["replica.test"] = [TWO]
            clock.now += RETRY_S
            assert await local_address(dial) == TWO
            assert server.asked["replica.test"] == 2


async def test_where_all_refuse_the_replica_refuses_also_if_the_name_server_is_silent() -> None:
    async with Listener().at(ONE) as listener:
        port = listener.port
    dial, server = dialer(port, ONE, TWO, clock=(clock := Clock()))
    with pytest.raises(ReplicaFailure) as caught:
        await dial.connect(10)
    assert (caught.value.reason, caught.value.reached) == ("refused", False)
    clock.now += RETRY_S
    server.hang("replica.test")
    begun = asyncio.get_running_loop().time()
    with pytest.raises(ReplicaFailure) as caught:
        await dial.connect(60)
    assert caught.value.reason == "refused"
    assert asyncio.get_running_loop().time() - begun < 5
    server.go_on()


async def test_time_that_runs_out_is_an_error() -> None:
    async with Listener().at(TWO) as listener:
        with black_hole(ONE, listener.port):
            dial, _ = dialer(listener.port, ONE)
            with pytest.raises(ReplicaFailure, match=r"^no connection within 0.4 s$") as caught:
                await dial.connect(0.4)
            assert caught.value.reason == "unreachable"


async def test_a_look_up_that_fails_for_want_of_files_is_not_the_replicas_failure() -> None:
    dial, server = dialer(1)
    server.answers["replica.test"] = OSError(24, "Too many open files")
    with pytest.raises(GatewayError, match="out of resources"):
        await dial.connect(10)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed one of replica.test; its key lies beside it."""
    command = [tool("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    names = ["-subj", "/CN=replica.test", "-addext", "subjectAltName=DNS:replica.test"]
    subprocess.run([*command, *files, *names], check=True, capture_output=True)
    return tmp_path / "certificate"


async def test_tls_is_about_the_name_not_the_address(certificate: Path) -> None:
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate, certificate.with_name("key"))
    asked: list[str | None] = []
    theirs.sni_callback = lambda _socket, name, _context: asked.append(name)
    ours = ssl.create_default_context(cafile=str(certificate))
    resolver = Resolver(lambda _host: [ONE])
    async with Listener().at(ONE, tls=theirs) as listener:
        assert await local_address(Dialer("replica.test", listener.port, ours, resolver)) == ONE
        with pytest.raises(ReplicaFailure, match="certificate"):
            await Dialer("other.test", listener.port, ours, resolver).connect(10)
    assert asked == ["replica.test", "other.test"]
