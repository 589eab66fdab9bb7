"""`warmroute status` and `warmroute drain` against gateways in this process, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import compose
from gateway.commands.cli import main
from gateway.commands.operate import DEFAULT_ADMIN, OperatorError, ask
from gateway.config.schema import Config, PoolConfig
from gateway.core import Surroundings
from gateway.features.sharing.metrics import SharingMetrics
from gateway.fleet.membership import Member
from gateway.server.endpoints import ADMIN, clients_runner, side_runner
from tests.gateway.conftest import LOGGED, config_over, eventually, listening, running, serving_runner
from tests.gateway.features.sharing.conftest import sharing
from tests.support.fakes import FakeReplica, http, models, writes
from tests.support.redis import RedisServer, serving

Capture = pytest.CaptureFixture[str]


async def said(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)"""
    code = await asyncio.to_thread(main, arguments)
    return code, *capsys.readouterr()


def drains(run: Any, name: str) -> bool:
    return bool(run.gateway.fleet.named(name).draining)


async def test_the_default_is_where_a_gateway_without_a_configuration_has_its_listener() -> None:
    assert f"http://{Config(pools=(PoolConfig(),)).admin}" == DEFAULT_ADMIN


async def test_a_table_of_the_replicas(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("replicas: []")
    found = {"discovery": [{"file": str(tmp_path / "list.yaml")}]}
    async with FakeReplica() as one, running(one, "http://127.0.0.1:9", **found) as run:
        await run.post()
        code, out, _ = await said(capsys, "status", "--admin", run.admin_url)
        header, first, second, source = out.splitlines()
        assert header.split() == ["replica", "pool", "state", "in", "flight", "booked", "tokens", "held", "tokens"]
        name, pool, state, inflight, booked, held = first.split()
        assert (code, name, pool, state, inflight, booked) == (0, one.name, "default", "up", "0", "0")
        assert int(held) > 0
        assert second.split()[:3] == ["127.0.0.1:9", "default", "down"]
        assert "Connect call failed" in second
        assert source == f"file {tmp_path}/list.yaml: 0 replicas"
        code, out, _ = await said(capsys, "status", "--json", "--admin", run.admin_url.removeprefix("http://"))
        assert (code, json.loads(out)["replicas"][0]["name"]) == (0, one.name)


class Empty:
    """A source that finds nothing, and says why."""

    name, pool, settings, problem, note = "dns a", "default", None, "", "there is no such name"

    async def watch(self, *, expects: bool) -> AsyncIterator[Sequence[Member]]:
        yield ()
        await asyncio.Event().wait()


async def test_the_note_of_a_source_is_no_problem(capsys: Capture) -> None:
    async with FakeReplica() as one:
        gateway = compose(config_over(one), LOGGED, Surroundings(members=lambda _config: [Empty()]))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            (watch,) = gateway.local.membership.watches.all
            await watch.answered.wait()
            _, out, _ = await said(capsys, "status", "--admin", run.admin_url)
            assert out.splitlines()[-1] == "dns a: 0 replicas, there is no such name"
            async with run.session.get(f"{run.admin_url}/metrics") as answer:
                assert 'warmroute_discovery_up{source="dns a"} 1.0' in await answer.text()


async def test_whether_it_shares_with_other_gateways(capsys: Capture) -> None:
    async with FakeReplica() as one, running(one, sharing={"url": "redis://127.0.0.1:1"}) as run:
        await eventually(lambda: run.gateway.metrics.of(SharingMetrics).errors.values[("unreachable",)])
        _, out, _ = await said(capsys, "status", "--admin", run.admin_url)
        assert out.splitlines()[-1].startswith("sharing as default: the store is away: unreachable (ConnectionError: Error 111")


async def test_by_a_unix_socket(capsys: Capture, tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    async with FakeReplica() as one, running(one) as run, listening(side_runner(run.gateway.served, ADMIN), path) as url:
        code, out, _ = await said(capsys, "status", "--admin", url)
        assert (code, one.name in out) == (0, True)


async def test_a_drain_goes_to_each_gateway(capsys: Capture) -> None:
    async with FakeReplica() as one, running(one) as a, running(one) as b:
        both = ["--admin", f"{a.admin_url},{b.admin_url}"]
        code, out, _ = await said(capsys, "drain", one.name, *both)
        assert (code, drains(a, one.name), drains(b, one.name)) == (0, True, True)
        assert out.splitlines() == [f"{each.admin_url}: {one.name} gets no new requests; running there: 0" for each in (a, b)]
        assert "draining, up" in (await said(capsys, "status", "--admin", a.admin_url))[1]
        code, out, _ = await said(capsys, "drain", one.name, "--off", *both)
        assert (code, drains(a, one.name), drains(b, one.name)) == (0, False, False)
        assert out.count("gets requests") == 2


async def test_sleepers_and_the_roles_of_a_divided_pool_are_shown(capsys: Capture) -> None:
    sleeps = writes(http(200, b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n', "text/plain; version=0.0.4"))
    sleeper = FakeReplica(listing=models("m", owner="vllm"), pages={"/metrics": sleeps})
    async with FakeReplica() as prefiller, sleeper:
        divided = {"name": "p", "prefill": [prefiller.url], "decode": [sleeper.url]}
        async with running(pools=[divided]) as run:
            await run.gateway.fleet.probe_all(run.gateway.upstream)
            lines = (await said(capsys, "status", "--admin", run.admin_url))[1].splitlines()[1:]
    assert [line.split()[:-3] for line in lines] == [
        [sleeper.name, "p", "decode", "asleep,", "up"],
        [prefiller.name, "p", "prefill", "up"],
    ]


async def test_one_gateway_that_fails_does_not_keep_the_others_from_it(capsys: Capture) -> None:
    async with FakeReplica() as one, running("http://127.0.0.1:9") as without, running(one) as run:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            gone = f"http://127.0.0.1:{closed.getsockname()[1]}"
            code, out, err = await said(capsys, "drain", one.name, "--admin", f"{gone},{without.admin_url},{run.admin_url}")
    assert code == 1
    assert out.startswith(run.admin_url)
    unreachable, unknown = err.splitlines()
    assert unreachable.startswith(f"warmroute: {gone} cannot be reached: Connection refused. Is the gateway running?")
    assert unknown.startswith(f"warmroute: {without.admin_url}: There is no replica '{one.name}'")


async def test_the_status_of_several_gateways(capsys: Capture) -> None:
    async with FakeReplica() as one, running(one) as a, running("http://127.0.0.1:9") as b:
        code, out, _ = await said(capsys, "status", "--admin", f"{a.admin_url}, {b.admin_url}")
        lines = out.splitlines()
        assert (code, lines[0], lines[3]) == (0, f"{a.admin_url}:", f"{b.admin_url}:")
        assert [line.split()[0] for line in (lines[2], lines[5])] == [one.name, "127.0.0.1:9"]
        code, out, _ = await said(capsys, "status", "--json", "--admin", f"{a.admin_url},{b.admin_url}")
        names = {url: answer["replicas"][0]["name"] for url, answer in json.loads(out).items()}
        assert (code, names) == (0, {a.admin_url: one.name, b.admin_url: "127.0.0.1:9"})
        code, out, err = await said(capsys, "status", "--admin", f"ftp://h,{a.admin_url}")
        assert (code, out.splitlines()[0]) == (1, f"{a.admin_url}:"), "one that fails does not keep the others from it"
        assert err.startswith("warmroute: 'ftp://h' is no URL")
        code, out, err = await said(capsys, "status", "--json", "--admin", f"ftp://h,{a.admin_url}")
        assert (code, list(json.loads(out)), err.count("\n")) == (1, [a.admin_url], 1)


async def test_a_source_that_drains_goes_on(capsys: Capture, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "list.yaml"

    def logged() -> list[str]:
        return [record.message for record in caplog.records if record.message.startswith("source")]

    async with FakeReplica() as one:
        file.write_text(f"replicas: [{{url: '{one.url}'}}]")
        async with running(pools=[{}], discovery=[{"file": str(file)}]) as run:
            file.write_text(f"replicas: [{{url: '{one.url}', draining: true}}]")
            await eventually(lambda: drains(run, one.name))
            code, out, _ = await said(capsys, "drain", one.name, "--off", "--admin", run.admin_url)
            assert (code, "the source that found it drains it" in out) == (0, True)
            assert logged() == ["source drains replica"]
            file.write_text(f"replicas: [{{url: '{one.url}'}}]")
            await eventually(lambda: not drains(run, one.name))
            assert logged() == ["source drains replica", "source no longer drains replica"]


async def test_the_admin_key(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMROUTE_ADMIN_KEY", raising=False)
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        code, _, err = await said(capsys, "status", "--admin", run.admin_url)
        assert (code, err) == (1, f"warmroute: {run.admin_url}: it has an admin key: set WARMROUTE_ADMIN_KEY to it\n")
        monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "k-2")
        code, _, err = await said(capsys, "drain", one.name, "--admin", run.admin_url)
        assert (code, err) == (1, f"warmroute: {run.admin_url}: WARMROUTE_ADMIN_KEY is not its admin key\n")
        monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "k-1")
        assert (await said(capsys, "status", "--admin", run.url))[0] == 0, "with the key, the clients' port has them, too"


async def test_what_is_no_admin_listener(capsys: Capture) -> None:
    async with FakeReplica() as one, running(one) as run:
        code, _, err = await said(capsys, "status", "--admin", run.url)
        assert (code, "on the admin listener" in err) == (1, True)
        code, _, err = await said(capsys, "status", "--admin", one.url)
        assert (code, err) == (1, f"warmroute: {one.url} is no admin listener of a gateway of this release: it answers 200\n")
    assert (await said(capsys, "drain", "r", "--admin", ""))[0] == 1
    for wrong in ("ftp://h", "http://", "http://h:port"):
        code, _, err = await said(capsys, "status", "--admin", wrong)
        assert (code, err.startswith(f"warmroute: {wrong!r} is no URL of an admin listener: ValueError: ")) == (1, True)


async def test_a_path_that_is_not_there_names_those_that_are() -> None:
    async with FakeReplica() as one, running(one) as run:
        for base in (run.url, run.admin_url):
            async with run.session.get(f"{base}/warmroute/replica") as answer:
                text = (await answer.json())["error"]["message"]
            assert "GET /warmroute/replicas, " in text
            assert "DELETE /warmroute/replicas/NAME, POST /warmroute/drain, " in text


async def test_gateways_that_are_not_followed_are_named(capsys: Capture, tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path)) as store:
        url, other = {"sharing": {"url": store.url}}, {"routing": {"block_bytes": 128}}
        async with FakeReplica() as one, sharing(one, **url) as run, sharing(one, **url, **other):
            await eventually(lambda: run.gateway.metrics.of(SharingMetrics).refused.values[("format",)])
            _, out, _ = await said(capsys, "status", "--admin", run.admin_url)
        assert out.splitlines()[-2] == "sharing as default: other gateways: 0"
        assert "routing.block_bytes is 128 there and 256 here" in out.splitlines()[-1]


async def test_one_that_does_not_answer_in_time_may_still_do_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OperatorError, match=f"{admin} has not answered within 0.1 s; it may still do it"):
            await asyncio.to_thread(ask, admin, "POST", "/warmroute/drain", {"name": "a"}, {}, 0.1)


def odd_server(body: bytes, code: int = 200) -> AbstractContextManager[str]:
    return raw_server(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (code, len(body), body))


@contextlib.contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """Answers each connection so. Yields its address."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(65536)
                    client.sendall(answer)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):  # a body that comes later: closing before would reset the answer
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes it
            thread.join()


ODD = [
    b"[" * 100_000,
    b'{"replicas": 3, "sources": []}',
    b'{"replicas": []}',
    b'{"replicas": [{}], "sources": []}',
    b'{"draining": true}',
    b"{}",
    b"null",
    b"\xff",
    b"",
]


@pytest.mark.parametrize("code", [200, 500])
@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
def test_odd_answers_are_named(capsys: Capture, body: bytes, code: int) -> None:
    with odd_server(body, code) as admin:
        for command in (["status"], ["status", "--json"], ["drain", "a"]):
            assert main([*command, "--admin", admin]) == 1
            refused = f"warmroute: {admin} is no admin listener of a gateway of this release: it answers {code}\n"
            assert capsys.readouterr().err == refused


def test_a_terminal_gets_no_escape_sequences(capsys: Capture) -> None:
    error = {"error": {"message": "no \x1b]0;title\x07 \x1b[2J replica"}}
    with odd_server(json.dumps(error).encode(), 404) as admin:
        assert main(["drain", "a", "--admin", admin]) == 1
    assert capsys.readouterr().err == f"warmroute: {admin}: no ?]0;title? ?[2J replica\n"


def test_the_admin_key_is_never_shown(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with odd_server(b'{"error": {"message": "no"}}', 401) as admin:
        monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "secret\n")
        assert main(["status", "--admin", admin]) == 1
        assert capsys.readouterr().err.endswith("WARMROUTE_ADMIN_KEY is not its admin key\n"), "a line end is none of it"
        for key in ("sec\nret", "sécret"):
            monkeypatch.setenv("WARMROUTE_ADMIN_KEY", key)
            assert main(["status", "--admin", admin]) == 1
            assert capsys.readouterr().err == "warmroute: WARMROUTE_ADMIN_KEY has a character that a header cannot have\n"


@pytest.mark.parametrize(
    ("begin", "on"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "chunk", "headers", "continue"],
)
def test_an_answer_that_trickles_has_an_end(begin: bytes, on: bytes) -> None:
    """The limit is for the whole answer, not for each part."""

    def trickle() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(begin)
            while not ended.wait(0.02):
                client.sendall(on)

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(OperatorError, match="has not answered within"):
                ask(f"127.0.0.1:{listener.getsockname()[1]}", "GET", "/warmroute/replicas", None, {}, 0.3)
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}",
        b"",
    ],
    ids=["chunk size", "no HTTP", "cut off", "nothing"],
)
def test_what_is_no_answer(answer: bytes, capsys: Capture) -> None:
    with raw_server(answer) as admin:
        assert main(["status", "--admin", admin]) == 1
    assert f"{admin} is no admin listener of a gateway of this release" in capsys.readouterr().err


@pytest.mark.parametrize("more", [b'"\xff"', b"1" * 5000], ids=["not UTF-8", "a long number"])
def test_odd_values_in_fields_that_are_not_read(more: bytes, capsys: Capture) -> None:
    with odd_server(b'{"replicas": [], "sources": [], "more": ' + more + b"}") as admin:
        assert main(["status", "--json", "--admin", admin]) == 1
    assert f"{admin} is no admin listener of a gateway of this release" in capsys.readouterr().err


def test_a_servers_text_is_nothing_that_a_terminal_obeys() -> None:
    """Each command prints these errors."""
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r\nwarmroute: all is well"
    assert str(OperatorError(hostile)).isprintable()
