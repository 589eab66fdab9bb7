"""A key and TLS options per replica, on real sockets: who is trusted, what is sent, what operators and clients read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.schema import KeyConfig, TlsConfig
from gateway.errors import ReplicaFailure
from gateway.upstream.access.credentials import MAX_CONTEXTS, MAX_KEY_BYTES, Credentials, TlsContexts, load
from tests.gateway.cluster.test_reload import reload
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.request.test_dialects import message
from tests.gateway.upstream.certificates import Authority, Certificate
from tests.support.fakes import FakeReplica, FakeRequest, answers, http, models, status, writes

SECRET = "sk-first-secret"
OTHER = "sk-second-secret"
OFTEN = {"interval_s": 0.02}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


def serves(certificate: Certificate, clients: Authority | None = None) -> ssl.SSLContext:
    """clients: whose certificates it asks for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    if clients:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients.ca)
    return context


def keyed(key: str) -> Any:
    """Behaviours of a server that wants this key: its model list, an answer."""

    def guarded(behaviour: Any) -> Any:
        async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
            good = request.headers.get("authorization") == f"Bearer {key}"
            await (behaviour if good else status(401, "who are you?"))(request, writer)

        return behave

    return {"listing": guarded(models("m")), "script": (guarded(answers()),)}


async def row(run: Running) -> dict[str, Any]:
    listed: dict[str, Any] = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"][0]
    return listed


def written(path: Path, text: str) -> Path:
    """By a rename, as secrets are rotated."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)
    return path


# -- keys


@pytest.mark.parametrize("place", ["env", "file"])
async def test_the_gateways_key_takes_the_place_of_the_clients(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUR_KEY", SECRET)
    key = {"env": "OUR_KEY"} if place == "env" else {"file": str(written(tmp_path / "key", f"{SECRET}\n"))}
    caplog.set_level(logging.DEBUG)
    async with FakeReplica(**keyed(SECRET)) as replica, running({"url": replica.url, "key": key}) as run:
        headers = {"Authorization": "Bearer client", "X-Api-Key": "client", "api-key": "client", "X-Other": "kept"}
        assert (await run.post(headers=headers))[0] == 200
        (request,) = replica.requests
        sent = {name: value for name, value in request.headers.items() if "key" in name or name in ("authorization", "x-other")}
        assert sent == {"authorization": f"Bearer {SECRET}", "x-other": "kept"}
        shown = [(await run.get(path))[2].decode() for path in ("/warmroute/replicas", "/metrics", "/v1/models")]
        inside = [repr(each) for each in (run.gateway.config, run.gateway.upstream, *run.gateway.fleet.replicas)]
        assert (await row(run))["up"] is True
    assert SECRET not in "".join([*shown, *inside, caplog.text])


async def test_a_key_for_anthropics_own_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses what has no version, and its list of models has another form."""
    monkeypatch.setenv("OUR_KEY", SECRET)
    entry = {"type": "model", "id": "claude-sonnet-4-5", "display_name": "Sonnet", "created_at": "2025-09-29T00:00:00Z"}
    listing = writes(http(200, json.dumps({"data": [entry], "has_more": False}).encode()))
    headers = {"Authorization": "Bearer client", "X-Api-Key": "client", "anthropic-beta": "b"}
    asked = list[dict[str, str]]()

    def guarded(behaviour: Any) -> Any:
        async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
            asked.append(request.headers)
            good = request.headers.get("x-api-key") == SECRET and "anthropic-version" in request.headers
            await (behaviour if good else status(401, "who are you?"))(request, writer)

        return behave

    async with FakeReplica([guarded(message())], listing=guarded(listing)) as replica:
        key = {"env": "OUR_KEY", "header": "x-api-key"}
        async with running({"url": replica.url, "key": key}) as run:
            assert (await row(run))["up"] is True
            turns = [{"role": "user", "content": "hi"}]
            body = {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": turns}
            for lines in (headers, {**headers, "anthropic-version": "2099-01-01"}):
                assert (await run.post(body, "/v1/messages", headers=lines))[0] == 200
    *_, unversioned, versioned = asked
    assert (unversioned["anthropic-version"], versioned["anthropic-version"]) == ("2023-06-01", "2099-01-01")
    assert {(each["x-api-key"], "authorization" in each) for each in asked} == {(SECRET, False)}
    assert versioned["anthropic-beta"] == "b"


async def test_without_a_key_of_its_own_the_clients_key_goes_on() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        await run.post(headers={"Authorization": "Bearer client", "X-Api-Key": "too"})
        assert (replica.requests[0].headers["authorization"], replica.requests[0].headers["x-api-key"]) == (
            "Bearer client",
            "too",
        )


async def test_replicas_of_a_pool_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", SECRET)
    monkeypatch.setenv("TWO", OTHER)
    async with FakeReplica(**keyed(SECRET)) as one, FakeReplica(**keyed(OTHER)) as two:
        pool = {"replicas": [{"url": one.url, "key": {"env": "ONE"}}, {"url": two.url, "key": {"env": "TWO"}}]}
        async with running(pools=[pool]) as run:
            assert [state.up for state in run.gateway.fleet.replicas] == [True, True]


async def test_a_refused_key_takes_the_replica_down_and_is_no_fault_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", "wrong")
    async with (
        FakeReplica(**keyed(SECRET)) as replica,
        running({"url": replica.url, "key": {"env": "OUR_KEY"}}, health=OFTEN) as run,
    ):
        await eventually(lambda: not next(iter(run.gateway.fleet.replicas)).up)
        listed = await row(run)
        assert (listed["up"], listed["error"]) == (
            False,
            "it refuses the key that the gateway has for it (GET /v1/models answers 401)",
        )
        code, _, body = await run.post(headers={"Authorization": "Bearer client", "X-Forwarded-For": "192.0.2.1"})
        assert code == 503
        assert "key" not in json.dumps(body), "why a replica is down is for operators"


@pytest.mark.parametrize("code", [401, 403])
async def test_a_key_that_only_requests_are_refused_for(code: int, monkeypatch: pytest.MonkeyPatch, request_lines: Any) -> None:
    monkeypatch.setenv("OUR_KEY", SECRET)
    async with FakeReplica([status(code, f"bad key {SECRET}")]) as bad, FakeReplica() as good:
        refusing = {"url": bad.url, "key": {"env": "OUR_KEY"}}
        async with running(refusing) as run:
            answered, _, body = await run.post()
            assert (answered, body["error"]["code"]) == (502, "replica_failed")
            (line,) = request_lines()
            (failed,) = line["failed_attempts"]
            assert (failed["reason"], failed["error"]) == (
                "no_access",
                f"it refuses the key that the gateway has for it (it answers {code})",
            )
            assert SECRET not in json.dumps([line, body])
        async with running(refusing, good) as run:
            for _ in range(4):
                assert (await run.post())[0] == 200, "another replica takes it"


async def test_without_a_key_a_401_is_the_clients() -> None:
    async with FakeReplica([status(401, "who are you?")]) as replica, running(replica) as run:
        assert (await run.post())[0] == 401


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "does not exist"),
        ("", "is empty"),
        ("two\nlines", "more than one line"),
        ("x" * (MAX_KEY_BYTES + 1), "is larger than"),
    ],
)
async def test_a_key_that_cannot_be_read_is_never_replaced_by_the_clients(text: str | None, error: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    async with FakeReplica() as replica, running({"url": replica.url, "key": {"file": str(path)}}, health=OFTEN) as run:
        await eventually(lambda: error in next(iter(run.gateway.fleet.replicas)).error)
        assert (await run.post(headers={"Authorization": "Bearer client"}))[0] == 503
        assert replica.connections == 0
        written(path, SECRET)
        await eventually(lambda: next(iter(run.gateway.fleet.replicas)).up)
        assert (await run.post())[0] == 200
        assert replica.requests[0].headers["authorization"] == f"Bearer {SECRET}"


async def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    async with FakeReplica() as replica, running({"url": replica.url, "key": {"env": "NOT_THERE"}}) as run:
        assert "the environment variable NOT_THERE is not set" in (await row(run))["error"]


async def test_a_rotated_key_is_used_without_a_reload(tmp_path: Path) -> None:
    path = written(tmp_path / "key", SECRET)
    async with FakeReplica() as replica, running({"url": replica.url, "key": {"file": str(path)}}, health=OFTEN) as run:
        await run.post()
        written(path, OTHER)

        async def used() -> bool:
            await run.post()
            return replica.requests[-1].headers["authorization"] == f"Bearer {OTHER}"

        async with asyncio.timeout(40):
            while not await used():
                pass
        path.unlink()
        for _ in range(3):
            assert await used(), "what cannot be read again stays"


async def test_a_reload_brings_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", SECRET)
    monkeypatch.setenv("TWO", OTHER)
    async with FakeReplica() as replica, running({"url": replica.url, "key": {"env": "ONE"}}) as run:
        await run.post()
        state = next(iter(run.gateway.fleet.replicas))
        await reload(run, {"url": replica.url, "key": {"env": "TWO"}})
        await run.post()
        await reload(run, replica)
        await run.post(headers={"Authorization": "Bearer client"})
        sent = [request.headers["authorization"] for request in replica.requests]
        assert sent == [f"Bearer {SECRET}", f"Bearer {OTHER}", "Bearer client"]
        assert next(iter(run.gateway.fleet.replicas)) is state, "it is the same replica"


async def test_found_replicas_get_their_sources_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", SECRET)
    async with FakeReplica(**keyed(SECRET)) as replica:
        listed = written(tmp_path / "replicas.yaml", f"replicas: ['{replica.url}']\n")
        source = {"file": str(listed), "key": {"env": "OUR_KEY"}}
        async with running(pools=[{}], discovery=[source]) as run:
            assert (await row(run))["up"] is True
            assert (await run.post())[0] == 200


async def test_operators_cannot_have_secrets_sent_to_what_they_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", SECRET)
    async with FakeReplica() as one, FakeReplica() as two, running({"url": one.url, "key": {"env": "OUR_KEY"}}) as run:
        code, _, body = await run.post({"url": two.url, "key": {"env": "OUR_KEY"}}, "/warmroute/replicas")
        assert (code, "unknown key" in body["error"]["message"]) == (400, True)
        code, _, body = await run.post({"url": one.url, "name": "again"}, "/warmroute/replicas")
        assert (code, "another key" in body["error"]["message"]) == (400, True)


# -- TLS


async def up_or_error(run: Running) -> str:
    listed = await row(run)
    return "up" if listed["up"] else listed["error"]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("nothing", "up"),
        ("CA", "certificate verify failed"),
        ("system", "certificate verify failed"),
        ("expired", "certificate has expired"),
        ("name", "not valid for 'other.test'"),
        ("address", "IP address mismatch"),
    ],
)
async def test_only_a_certificate_that_fits_is_trusted(wrong: str, error: str, authority: Authority, tmp_path: Path) -> None:
    certificate = authority.certificate("replica", expired=wrong == "expired")
    tls = {"ca_file": str(authority.ca), "server_name": "replica.test"}
    if wrong == "CA":
        tls["ca_file"] = str(Authority(tmp_path, "another").ca)
    if wrong == "name":
        tls["server_name"] = "other.test"
    if wrong == "address":
        del tls["server_name"]
    if wrong == "system":
        del tls["ca_file"]
    async with FakeReplica(tls=serves(certificate)) as replica, running({"url": replica.url, "tls": tls}) as run:
        assert error in await up_or_error(run)
        code, _, _ = await run.post(headers={"Authorization": "Bearer client"})
        assert code == (200 if wrong == "nothing" else 503)
        assert bool(replica.requests) == (wrong == "nothing")


async def test_a_certificate_for_the_address_needs_no_name(authority: Authority) -> None:
    certificate = authority.certificate("replica", san="IP:127.0.0.1")
    async with (
        FakeReplica(tls=serves(certificate)) as replica,
        running({"url": replica.url, "tls": {"ca_file": str(authority.ca)}}) as run,
    ):
        assert await up_or_error(run) == "up"


@contextlib.contextmanager
def handshakes(context: ssl.SSLContext) -> Iterator[int]:
    """Its port. Shakes hands in a thread, for asyncio's own server does not send the alert that says why it does not."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as secured:
                secured.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


async def test_a_replica_may_ask_for_the_gateways_certificate(authority: Authority, tmp_path: Path) -> None:
    clients = Authority(tmp_path, "clients")
    own = clients.certificate("gateway")
    tls = {"ca_file": str(authority.ca), "server_name": "replica.test", "cert_file": str(own.cert), "key_file": str(own.key)}
    context = serves(authority.certificate("replica"), clients)
    async with FakeReplica(tls=context) as replica, running({"url": replica.url, "tls": tls}) as run:
        assert await up_or_error(run) == "up"
        assert (await run.post())[0] == 200


@pytest.mark.parametrize(
    ("ours", "alert"), [("none", "alert certificate required"), ("of another authority", "alert unknown ca")]
)
async def test_what_a_replica_says_of_the_gateways_certificate_is_shown(
    ours: str, alert: str, authority: Authority, tmp_path: Path
) -> None:
    tls = {"ca_file": str(authority.ca), "server_name": "replica.test"}
    if ours != "none":
        own = authority.certificate("gateway")
        tls |= {"cert_file": str(own.cert), "key_file": str(own.key)}
    with handshakes(serves(authority.certificate("replica"), Authority(tmp_path, "clients"))) as port:
        async with running({"url": f"https://127.0.0.1:{port}", "tls": tls}, health=OFTEN) as run:
            await eventually(lambda: alert in next(iter(run.gateway.fleet.replicas)).error)
            assert (await run.post())[0] in (502, 503)


async def test_a_rotated_certificate_is_used_and_old_connections_are_not(authority: Authority, tmp_path: Path) -> None:
    """The authority that the gateway trusts is replaced: what was connected before is not used any more."""
    after = Authority(tmp_path, "after")
    ca = written(tmp_path / "trusted.pem", authority.ca.read_text())
    tls = {"ca_file": str(ca), "server_name": "replica.test"}
    async with (
        FakeReplica(tls=serves(authority.certificate("replica"))) as replica,
        running({"url": replica.url, "tls": tls}, health=OFTEN) as run,
    ):
        assert (await run.post())[0] == 200
        written(ca, after.ca.read_text())
        await eventually(lambda: not next(iter(run.gateway.fleet.replicas)).up)
        assert "certificate verify failed" in (await row(run))["error"]
        written(ca, "no certificate")
        await asyncio.sleep(0)
        written(ca, authority.ca.read_text())
        await eventually(lambda: next(iter(run.gateway.fleet.replicas)).up)
        assert (await run.post())[0] == 200


async def test_a_reload_brings_other_tls_options(authority: Authority, tmp_path: Path) -> None:
    good = {"ca_file": str(authority.ca), "server_name": "replica.test"}
    bad = {"ca_file": str(Authority(tmp_path, "another").ca), "server_name": "replica.test"}
    async with (
        FakeReplica(tls=serves(authority.certificate("replica"))) as replica,
        running({"url": replica.url, "tls": good}) as run,
    ):
        assert (await run.post())[0] == 200
        await reload(run, {"url": replica.url, "tls": bad})
        assert (await run.post())[0] in (502, 503), "no connection that was made by the old options"
        before = len(replica.requests)
        await reload(run, {"url": replica.url, "tls": good}, health=OFTEN)
        await eventually(lambda: next(iter(run.gateway.fleet.replicas)).up)
        assert (await run.post())[0] == 200
        assert len(replica.requests) == before + 1


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"ca_file": "/nowhere/ca.pem"}, "/nowhere/ca.pem does not exist"),
        ({"cert_file": "/nowhere/cert.pem"}, "/nowhere/cert.pem does not exist"),
        ({"ca_file": "/dev/null"}, "is not a regular file"),
        ({"ca_file": "/no\0where"}, "does not exist"),
    ],
)
def test_files_that_are_not_there_are_named(files: dict[str, str], error: str) -> None:
    with pytest.raises(ReplicaFailure, match=error):
        load(None, TlsConfig(**files), TlsContexts())


def test_a_key_file_that_cannot_be_there_is_one_that_is_not_there() -> None:
    with pytest.raises(ReplicaFailure, match="does not exist"):
        load(KeyConfig(file="/no\0where"), None, None)


def test_a_key_that_is_not_the_certificates_is_refused(authority: Authority, tmp_path: Path) -> None:
    one, two = authority.certificate("one"), authority.certificate("two")
    with pytest.raises(ReplicaFailure, match=r"the client certificate .*one\.pem and its key .*two\.key cannot be used"):
        load(None, TlsConfig(cert_file=str(one.cert), key_file=str(two.key)), TlsContexts())
    (tmp_path / "garbage").write_text("no PEM")
    with pytest.raises(ReplicaFailure, match="garbage cannot be used"):
        load(None, TlsConfig(ca_file=str(tmp_path / "garbage")), TlsContexts())


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        (b"A: 1\r\nauthorization: x\r\nB: 2\r\n", b"A: 1\r\nB: 2\r\n"),
        (b"AUTHORIZATION: x\r\nX-API-KEY: y\r\nApi-Key: z\r\n", b""),
        (
            b"X-Authorization: x\r\nNot-Api-Key: authorization: y\r\n",
            b"X-Authorization: x\r\nNot-Api-Key: authorization: y\r\n",
        ),
        (b"authorization:\r\nauthorization: a\r\nauthorization: b\r\n", b""),
    ],
)
def test_all_forms_of_a_clients_key_are_left_out(lines: bytes, left: bytes) -> None:
    assert Credentials(b"Authorization: Bearer k\r\n", None, {}).headers(lines) == left + b"Authorization: Bearer k\r\n"
    assert Credentials(b"", None, {}).headers(lines) == lines


def test_a_key_is_in_no_text(tmp_path: Path) -> None:
    read = load(KeyConfig(env="K"), None, None, env={"K": SECRET})
    assert SECRET not in repr(read)
    for bad in (f"{SECRET}\n{SECRET}", f"{SECRET}\x07", f"ü{SECRET}"):
        with pytest.raises(ReplicaFailure) as refused:
            load(KeyConfig(env="K"), None, None, env={"K": bad})
        assert SECRET not in str(refused.value)


def test_replicas_with_the_same_options_share_a_context(authority: Authority, tmp_path: Path) -> None:
    contexts = TlsContexts()
    ca = written(tmp_path / "trusted.pem", authority.ca.read_text())
    one, again = contexts.of(TlsConfig(ca_file=str(ca))), contexts.of(TlsConfig(ca_file=str(ca)))
    assert one is again
    written(ca, Authority(tmp_path, "after").ca.read_text())
    assert contexts.of(TlsConfig(ca_file=str(ca))) is not one, "another file"
    for number in range(MAX_CONTEXTS + 5):
        contexts.of(TlsConfig(ca_file=str(ca), server_name=f"r{number}.test"))
    assert len(contexts) <= MAX_CONTEXTS


async def test_a_url_with_tls_options_is_never_connected_to_without_them(authority: Authority) -> None:
    """Also while a reload changes them: no request goes out in clear."""
    seen: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(3))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = [{"ca_file": str(authority.ca)}, {"ca_file": str(authority.ca), "server_name": "replica.test"}]
    async with running({"url": url, "tls": options[0]}, health=OFTEN) as run:
        for number in range(12):
            asking = [asyncio.create_task(run.post()) for _ in range(5)]
            await reload(run, {"url": url, "tls": options[number % 2]}, health=OFTEN)
            assert {(await each)[0] for each in asking} <= {502, 503}
        await eventually(lambda: len(seen) > 5)
    server.close()
    assert {data[:1] for data in seen} <= {b"\x16", b""}, "TLS handshakes only"
