"""`warmroute top` where there is no terminal, and before there is a screen."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.commands.cli import main
from gateway.commands.operate import DEFAULT_ADMIN
from tests.gateway.commands.test_check import WITHOUT
from tests.gateway.commands.top.test_feed import sending
from tests.gateway.conftest import BODY, Running, running
from tests.support.compiled import COMPILED
from tests.support.fakes import FakeReplica, answers, http, models
from tests.support.packages import Kind, packed

Capture = pytest.CaptureFixture[str]
PRICES = {"*": {"input": 1.0, "cached_input": 0.1, "output": 2.0}}
NAME = "[red]x[/]\x1b[31m\u202e"


async def said(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)"""
    code = await asyncio.to_thread(main, ("top", *arguments))
    return code, *capsys.readouterr()


async def piped(run: Running, *options: str) -> tuple[int, str, str]:
    """A process of its own, with a pipe for a terminal."""
    command = [sys.executable, "-m", "gateway", "top", "--admin", run.admin_url, *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, stdin=asyncio.subprocess.DEVNULL)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_pipe_gets_one_snapshot() -> None:
    async with (
        FakeReplica([answers(prompt=100, cached=40)]) as one,
        FakeReplica() as other,
        running(one, other, prices=PRICES) as run,
    ):
        code, out, err = await piped(run)
        assert (code, err) == (0, "")
        assert "No request yet since this gateway is watched" in out
        await run.post(headers={"X-Tenant-Id": "acme"})
        code, out, err = await piped(run)
        assert (code, err) == (0, "")
        assert "\x1b" not in out
        lines = [line.split() for line in out.splitlines()]
        assert ["replica", "pool", "state", "running", "waiting", "prefill", "held", "capacity", "cached"] in lines
        assert {line[0] for line in lines if line[1:3] == ["default", "up"]} == {one.name, other.name}
        [request] = [line for line in lines if "200" in line]
        assert request[2:4] == ["m", "acme"]
        assert ["acme", "1", "0"] in [line[:3] for line in lines]


async def test_names_do_not_reach_the_terminal_as_they_are(capsys: Capture) -> None:
    async with FakeReplica([answers()], listing=models(NAME)) as one, running(one) as run:
        await said(capsys, "--once", "--admin", run.admin_url)
        await run.post({**BODY, "model": NAME})
        code, out, _ = await said(capsys, "--once", "--admin", run.admin_url)
        assert code == 0
        assert "[red]x[/]\ufffd[31m\ufffd" in out
        assert not set(out) & {"\x1b", "\u202e"}


async def test_what_cannot_be_asked_is_an_error(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMROUTE_ADMIN_KEY", raising=False)
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        code, out, err = await said(capsys, "--once", "--admin", run.admin_url)
        assert (code, out) == (1, "")
        assert err == f"warmroute: {run.admin_url}: it has an admin key: set WARMROUTE_ADMIN_KEY to it\n"
        monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "k-1\n")
        assert (await said(capsys, "--once", "--admin", run.admin_url))[0] == 0
    code, _, err = await said(capsys, "--once", "--admin", "http://127.0.0.1:9")
    assert (code, "cannot be reached" in err, DEFAULT_ADMIN in err) == (1, True, True)
    code, _, err = await said(capsys, "--once", "--admin", "http://a:b\x1b[2J")
    assert (code, "\x1b" in err) == (1, False)


async def test_a_gateway_without_the_feed_is_an_error(capsys: Capture) -> None:
    found = http(200, b"{}"), http(404, b'{"error": {"message": "There is nothing at /warmroute/live"}}')
    for answer in found:
        async with sending(answer) as url:
            code, _, err = await said(capsys, "--once", "--admin", url)
            assert code == 1
            assert err.endswith("has no live feed: it is no admin listener (admin_listen), or is of an older release\n")
    for answer in (http(404, b"<html>", "text/html"), http(200, b"[]"), http(500, b"")):
        async with sending(answer) as url:
            code, _, err = await said(capsys, "--once", "--admin", url)
            assert (code, err.startswith(f"warmroute: {url}"), len(err.splitlines())) == (1, True, 1)


def test_a_terminal_needs_textual_and_says_so() -> None:
    ours, its = pty.openpty()
    command = [sys.executable, "-c", WITHOUT.format("textual"), "top", "--admin", "http://127.0.0.1:9"]
    done = subprocess.run(command, stdin=its, stdout=its, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    for end in (ours, its):
        os.close(end)
    assert done.returncode == 1
    assert "pip install 'warmroute[top]'" in done.stderr


@pytest.mark.skipif(COMPILED, reason="a compiled copy has nothing to build packages of")
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_style_of_the_screens_is_in_the_packages(kind: Kind, tmp_path: Path) -> None:
    assert "gateway/commands/top/screens/top.tcss" in packed(kind, tmp_path)
