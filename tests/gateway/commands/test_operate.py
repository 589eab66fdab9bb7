"""`warmroute status` and `warmroute drain` against gateways in this process, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.commands.cli import main
from gateway.commands.operate import DEFAULT_ADMIN
from gateway.config.schema import Config, PoolConfig
from gateway.server.endpoints import ADMIN, side_runner
from tests.gateway.conftest import eventually, running
from tests.support.fakes import FakeReplica

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


async def test_whether_it_shares_with_other_gateways(capsys: Capture) -> None:
    async with FakeReplica() as one, running(one, sharing={"url": "redis://127.0.0.1:1"}) as run:
        await eventually(lambda: run.gateway.metrics.sharing_errors.values[("unreachable",)])
        _, out, _ = await said(capsys, "status", "--admin", run.admin_url)
        assert out.splitlines()[-1].startswith("sharing as default: the store is away: unreachable (ConnectionError: Error 111")


async def test_by_a_unix_socket(capsys: Capture, tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    async with FakeReplica() as one, running(one) as run:
        runner = side_runner(run.gateway.served, ADMIN)
        await runner.setup()
        try:
            await web.UnixSite(runner, path).start()
            code, out, _ = await said(capsys, "status", "--admin", f"unix:{path}")
            assert (code, one.name in out) == (0, True)
        finally:
            await runner.cleanup()


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


async def test_a_source_that_drains_goes_on(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    async with FakeReplica() as one:
        file.write_text(f"replicas: [{{url: '{one.url}', draining: true}}]")
        async with running(pools=[{}], discovery=[{"file": str(file)}]) as run:
            code, out, _ = await said(capsys, "drain", one.name, "--off", "--admin", run.admin_url)
            assert (code, "the source that found it drains it" in out) == (0, True)


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
        assert (code, err) == (1, f"warmroute: {one.url} is no admin listener of a gateway: it answers 200\n")
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
