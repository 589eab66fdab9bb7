"""TLS of the gateway's own listeners: certificates that change, handshakes that cost, clients that refuse a wrong chain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway.cluster.accepted import AcceptedConnections
from gateway.cluster.handshakes import PER_TURN, Handshakes
from gateway.cluster.listener_tls import ListenerTls, context_of
from gateway.commands.cli import main
from gateway.config.parse import ConfigError
from gateway.config.schema import ListenerTlsConfig
from gateway.server.endpoints import clients_runner, side_runner
from gateway.server.http.accept import Acceptor
from tests.gateway.conftest import Running, config_over, eventually, running
from tests.gateway.upstream.certificates import Authority, Certificate
from tests.support.fakes import FakeReplica, answers, streams

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SAN = "IP:127.0.0.1"


@functools.cache
def authority(folder: Path, name: str) -> Authority:
    return Authority(folder, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


def config_of(certificate: Certificate) -> ListenerTlsConfig:
    return ListenerTlsConfig(str(certificate.cert), str(certificate.key))


@contextlib.asynccontextmanager
async def secured(run: Running, tls: ListenerTls, *, name: str = "") -> AsyncIterator[int]:
    """The port of a listener of this gateway with TLS. name: of a side listener."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = side_runner(run.gateway.served, name) if name else clients_runner(run.gateway.served)
    acceptor = Acceptor(listener, server, tls)
    try:
        yield listener.getsockname()[1]
    finally:
        acceptor.close()
        await server.shutdown(1)


async def served_certificate(port: int, ca: Path, local: str = "127.0.0.1") -> bytes:
    """The certificate that a new connection gets. Raises ssl.SSLError."""
    context = ssl.create_default_context(cafile=ca)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, local_addr=(local, 0))
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return found


def der(certificate: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.cert.read_text())


async def test_official_clients_over_tls_and_wrong_chains(folder: Path) -> None:
    ours, other = authority(folder, "ours"), authority(folder, "other")
    tls = ListenerTls(config_of(ours.certificate("gateway", san=SAN)))
    async with (
        FakeReplica([answers(), streams("a", "b")]) as replica,
        running(replica) as run,
        secured(run, tls) as port,
    ):
        base = f"https://127.0.0.1:{port}"
        good = ssl.create_default_context(cafile=ours.ca)
        for module, make in ((openai, openai.AsyncOpenAI), (anthropic, anthropic.AsyncAnthropic)):
            path = "/v1" if module is openai else ""
            for context in (good, ssl.create_default_context(cafile=other.ca), ssl.create_default_context()):
                http: Any = module.DefaultAsyncHttpxClient(verify=context)  # type: ignore[attr-defined]
                async with make(base_url=base + path, api_key="k", max_retries=0, http_client=http) as client:
                    if context is good:
                        assert [model.id async for model in await client.models.list()]
                    else:
                        with pytest.raises(module.APIConnectionError):  # type: ignore[attr-defined]
                            await client.models.list()
        http = openai.DefaultAsyncHttpxClient(verify=good)
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", http_client=http) as client:
            assert (await client.chat.completions.create(**BODY)).choices
            assert [event async for event in await client.chat.completions.create(**BODY, stream=True)]


async def test_a_body_that_is_too_long_gets_its_answer_over_tls(folder: Path) -> None:
    ours = authority(folder, "ours")
    tls = ListenerTls(config_of(ours.certificate("gateway", san=SAN)))
    async with FakeReplica([answers()]) as replica, running(replica, limits={"body_mb": 1}) as run, secured(run, tls) as port:
        context = ssl.create_default_context(cafile=ours.ca)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 100_000)
        assert (await reader.readline()).split()[1] == b"413"
        await reader.read()  # to the end of the connection
        writer.transport.abort()


async def test_operators_over_tls(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = authority(folder, "ours")
    tls = ListenerTls(config_of(ours.certificate("gateway", san=SAN)))
    async with FakeReplica() as replica, running(replica) as run, secured(run, tls, name="admin") as port:
        context = ssl.create_default_context(cafile=ours.ca)
        async with run.session.get(f"https://127.0.0.1:{port}/warmroute/replicas", ssl=context) as answer:
            assert answer.status == 200
        command = ["status", "--admin", f"https://127.0.0.1:{port}"]
        assert await asyncio.to_thread(main, command) == 1
        assert "has a certificate that is not trusted: unable to get local issuer certificate" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(ours.ca))
        assert await asyncio.to_thread(main, command) == 0
        assert replica.name in capsys.readouterr().out


async def test_a_certificate_that_is_replaced_is_served_and_garbage_is_not(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = authority(folder, "ours")
    first, second = ours.certificate("first", san=SAN), ours.certificate("second", san=SAN)
    used = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")

    def put(certificate: Certificate) -> None:
        for source, target in ((certificate.cert, used.cert), (certificate.key, used.key)):
            shutil.copy(source, f"{target}.new")
            Path(f"{target}.new").replace(target)

    def errors() -> int:
        return sum(each.message == "certificate not read again: the former one stays" for each in caplog.records)

    caplog.set_level(logging.INFO, "warmroute.gateway")
    put(first)
    tls = ListenerTls(config_of(used), look_s=0.001)
    async with FakeReplica() as replica, running(replica) as run, secured(run, tls) as port:
        following = asyncio.create_task(tls.run())
        assert await served_certificate(port, ours.ca) == der(first)
        before = tls.context
        put(second)
        await eventually(lambda: tls.context is not before)
        assert await served_certificate(port, ours.ca) == der(second)
        for number, spoil in enumerate(
            (
                lambda: used.cert.write_text("garbage"),
                used.cert.unlink,
                lambda: shutil.copy(first.cert, used.cert),  # it does not fit the key
            ),
            1,
        ):
            spoil()
            await eventually(lambda: errors() == number)  # noqa: B023  (it is awaited here)
            assert await served_certificate(port, ours.ca) == der(second)
        put(first)
        before = tls.context
        await eventually(lambda: tls.context is not before)
        assert await served_certificate(port, ours.ca) == der(first)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    assert errors() == 3, "once for each change"
    assert first.key.read_text().splitlines()[1] not in caplog.text


@pytest.mark.parametrize("wrong", ["missing", "garbage", "another key", "no key", "a pipe"])
def test_files_that_cannot_be_used_are_said_at_the_start(
    folder: Path, tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = authority(folder, "ours")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(ours.certificate("gateway").cert, cert)
    shutil.copy(ours.certificate("another" if wrong == "another key" else "gateway").key, key)
    if wrong == "missing":
        key.unlink()
    elif wrong == "a pipe":  # nobody writes into it
        cert.unlink()
        os.mkfifo(cert)
    elif wrong == "garbage":
        cert.write_bytes(b"\0" * 1000)
    config = ListenerTlsConfig(str(cert), "" if wrong == "no key" else str(key))
    with pytest.raises(ConfigError, match=r"tls.cert_file: .*cert.pem.* cannot be used"):
        context_of(config)
    file = tmp_path / "warmroute.yaml"
    key_file = f", key_file: {key}" if config.key_file else ""
    file.write_text(f"pools: [{{replicas: ['http://127.0.0.1:1']}}]\ntls: {{cert_file: {cert}{key_file}}}\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert "cannot be used" in capsys.readouterr().err


async def test_silent_clients_are_bounded_and_keep_nobody_else_out(folder: Path) -> None:
    """One client may have nine tenths of the places before the end of a handshake."""
    ours = authority(folder, "ours")
    tls = ListenerTls(config_of(ours.certificate("gateway", san=SAN)))
    async with FakeReplica() as replica, running(replica) as run, secured(run, tls) as port:
        handshakes = Handshakes(clients_runner(run.gateway.served), tls, max_opening=10)
        accepted = AcceptedConnections(clients_runner(run.gateway.served), handshakes=handshakes)
        listener = socket.create_server(("127.0.0.1", 0))
        silent = [await asyncio.open_connection(*listener.getsockname()) for _ in range(12)]
        for _ in silent:
            accepted.add(listener.accept()[0])
        await eventually(lambda: handshakes.opening.refused == 3)
        ends = [asyncio.ensure_future(reader.read()) for reader, _ in silent]
        _, pending = await asyncio.wait(ends, timeout=0.01)
        assert handshakes.opening.open == 9
        joining = asyncio.create_task(served_certificate(listener.getsockname()[1], ours.ca, local="127.0.0.2"))
        client, _ = await asyncio.get_running_loop().sock_accept(_unblocked(listener))
        accepted.add(client)
        assert await joining
        assert await served_certificate(port, ours.ca), "other listeners serve on"
        for _, writer in silent:
            writer.transport.abort()
        await asyncio.gather(*ends, return_exceptions=True)
        await accepted.wait()
        assert (handshakes.opening.open, len(pending) >= 9) == (0, True)
        listener.close()


def _unblocked(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    return sock


@pytest.mark.parametrize("sent", [b"", b"\x16", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00" + b"\0" * 50])
async def test_what_is_no_handshake_ends(folder: Path, sent: bytes) -> None:
    ours = authority(folder, "ours")
    tls = ListenerTls(config_of(ours.certificate("gateway", san=SAN)))
    made: list[asyncio.Protocol] = []

    class Never(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(self)

    handshakes = Handshakes(Never, tls, handshake_s=0.2)
    one, two = socket.socketpair(socket.AF_UNIX)
    two.setblocking(False)
    one.sendall(sent)
    with pytest.raises((OSError, TimeoutError)):
        await handshakes.open(two)
    assert (handshakes.opening.open, made) == (0, [])
    if b"HTTP" in sent:
        assert b"Use https://" in one.recv(1000)
    one.close()
    two.close()


async def test_few_handshakes_begin_in_one_turn_of_the_loop(folder: Path) -> None:
    tls = ListenerTls(config_of(authority(folder, "ours").certificate("gateway", san=SAN)))
    handshakes = Handshakes(asyncio.Protocol, tls)
    turns = [asyncio.create_task(handshakes._turn()) for _ in range(5 * PER_TURN)]
    turns[1].cancel()
    before = most = 0
    while before < len(turns):
        await asyncio.sleep(0)
        done = sum(each.done() for each in turns)
        most, before = max(most, done - before), done
    assert most <= PER_TURN + 1, "the cancelled one may end in the same turn"


@pytest.mark.parametrize(
    ("admin", "secure"),
    [("127.0.0.1:0", False), ("unix:/tmp/w.sock", False), ("auto", False), ("off", False), ("0.0.0.0:2", True)],
)
def test_operators_on_this_machine_need_no_tls(admin: str, secure: bool) -> None:
    raw: dict[str, Any] = {"tls": {"cert_file": "/cert.pem"}, "admin_listen": admin, "admin_key": "k"}
    assert config_over("http://127.0.0.1:1", **raw).admin_tls is secure
    assert config_over("http://127.0.0.1:1", **{**raw, "tls": {}}).admin_tls is False
