"""`warmroute status --watch`: processes of their own, on a pipe and on a terminal, in front of real gateways."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.commands.cli import main
from gateway.server.endpoints import ADMIN, side_runner
from tests.gateway.conftest import Running, listening, running
from tests.support.fakes import FakeReplica, answers

PIPE = asyncio.subprocess.PIPE
PRICES = {"*": {"input": 1000.0, "cached_input": 100.0, "output": 0.0}}


def command(admin: str) -> list[str]:
    return [sys.executable, "-m", "gateway", "status", "--watch", "0.1", "--admin", admin]


@contextlib.asynccontextmanager
async def piped(admin: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*command(admin), stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def until(stream: asyncio.StreamReader | None, *words: str) -> str:
    """The first line with all of these in it."""
    assert stream is not None
    async with asyncio.timeout(40):
        while line := (await stream.readline()).decode():
            if all(word in line for word in words):
                return line
    raise AssertionError(f"it ended without {words}")


@contextlib.asynccontextmanager
async def socket_of(run: Running, path: str) -> AsyncIterator[None]:
    """An admin listener of a gateway at this path."""
    async with listening(side_runner(run.gateway.served, ADMIN), path):
        yield


async def test_a_pipe_gets_one_table_after_another_until_ctrl_c() -> None:
    async with (
        FakeReplica([answers(prompt=1000, cached=400)]) as one,
        running(one, prices=PRICES) as run,
        piped(run.admin_url) as process,
    ):
        await until(process.stdout, run.admin_url)
        await run.post()
        line = await until(process.stdout, "40.0% of 1,000 prompt tokens cached")
        assert "USD 0.6400 spent, USD 0.3600 saved, 0 errors, 0 refused" in line
        assert (await until(process.stdout, one.name)).split()[1:4] == ["default", "up", "0"]
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert (process.returncode, err, b"\x1b" in out) == (130, b"", False)


async def test_it_goes_on_until_the_gateway_is_back(tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    async with FakeReplica() as one, running(one) as run, piped(f"unix:{path}") as process:
        error = await until(process.stderr, "cannot be reached")
        assert error.startswith(f"warmroute: unix:{path} cannot be reached: No such file or directory. Is the gateway running?")
        async with socket_of(run, path):
            await until(process.stdout, one.name, "up")
        await until(process.stderr, "cannot be reached")
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert (process.returncode, b"Traceback" in err) == (130, False)


async def test_a_gateway_that_cannot_be_asked_hides_no_other() -> None:
    async with FakeReplica() as one, running(one) as run, piped(f"ftp://h,{run.admin_url}") as process:
        assert (await until(process.stdout, one.name)).split()[1:3] == ["default", "up"]
        assert (await until(process.stderr, "ftp://h")).count("'ftp://h' is no URL") == 1


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """A pseudo terminal of 60 by 12 characters: our end, and the command's."""
    ours, its = pty.openpty()
    try:
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
        yield ours, its
    finally:
        os.close(ours)
        os.close(its)


async def test_a_terminal_is_refreshed_in_place_and_left_as_it_was(tmp_path: Path) -> None:
    text, path = "", str(tmp_path / "admin.sock")

    async def shows(*words: str) -> None:
        """In what is written from now on."""
        nonlocal text
        seen, text = "", ""
        async with asyncio.timeout(40):
            while not all(word in seen for word in words):
                if await asyncio.to_thread(select.select, [ours], [], [], 0.1) != ([], [], []):
                    seen += os.read(ours, 65_536).decode()
        text = seen

    async with FakeReplica() as one, running(one) as run:
        with terminal() as (ours, its):
            before = termios.tcgetattr(its)
            env = {**os.environ, "TERM": "xterm-256color"}
            process = await asyncio.create_subprocess_exec(
                *command(f"unix:{path}"), stdin=its, stdout=its, stderr=its, env=env, start_new_session=True
            )
            try:
                await shows("cannot be reached")
                async with socket_of(run, path):
                    await shows(one.name, "requests/s")
                    await shows("\x1b[1A", one.name)  # the cursor goes up, and writes it again
                await shows("cannot be reached")
                process.send_signal(signal.SIGINT)
                await shows("\x1b[?25h")  # the cursor is there again
                assert await process.wait() == 130
                assert "Traceback" not in text
                assert termios.tcgetattr(its) == before
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


@pytest.mark.parametrize("wrong", [["0"], ["nan"], ["1e9"], ["x"], ["1", "--json"]])
def test_what_cannot_be_watched_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--watch", *wrong])
    assert ended.value.code == 2
    assert "--watch" in capsys.readouterr().err
