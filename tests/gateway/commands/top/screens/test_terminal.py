"""The whole command: on a real terminal, and through a restart of its gateway."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gateway.commands.demo.processes import Process, admin_url
from tests.gateway.commands.top.screens.conftest import fleet, opened
from tests.support.fakes import FakeReplica

ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A pseudo terminal of 80 by 24 characters, with the command on it. text: all that it has written."""

    def __init__(self, *arguments: str, env: dict[str, str]) -> None:
        self._ours, self._its = pty.openpty()
        fcntl.ioctl(self._its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self._its)
        self.text = ""
        self._arguments = arguments
        self._env = {**os.environ, "TERM": "xterm-256color", **env}

    async def run(self) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "gateway", "top", *self._arguments]
        ends = {"stdin": self._its, "stdout": self._its, "stderr": self._its}
        return await asyncio.create_subprocess_exec(*command, **ends, env=self._env, start_new_session=True)

    @property
    def now(self) -> list[object]:
        return termios.tcgetattr(self._its)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    async def until(self, text: str) -> None:
        async with asyncio.timeout(40):
            while text not in self.text:
                await asyncio.to_thread(self.read, 0.2)

    def read(self, seconds: float) -> None:
        """What there is, and what comes in that time."""
        while select.select([self._ours], [], [], seconds)[0]:
            self.text += os.read(self._ours, 65_536).decode("utf-8", "replace")

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._its)


@contextlib.contextmanager
def terminal(*arguments: str, **env: str) -> Iterator[Terminal]:
    made = Terminal(*arguments, env=env)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("end", ["q", "\x03", "SIGTERM", "SIGHUP"])
async def test_the_terminal_is_as_before_at_the_end(end: str) -> None:
    async with fleet() as (run, [one, _]):
        with terminal("--admin", run.admin_url) as screen:
            process = await screen.run()
            await screen.until(one.name)
            assert ALTERNATE in screen.text
            assert screen.now != screen.before
            if end.startswith("SIG"):
                process.send_signal(getattr(signal, end))
            else:
                screen.type(end)
            async with asyncio.timeout(40):
                while process.returncode is None:
                    await asyncio.to_thread(screen.read, 0.1)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), 0.1)
            screen.read(0.1)
            assert process.returncode == 0
            assert screen.text.rindex(NORMAL) > screen.text.rindex(ALTERNATE)
            assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("\x1b[?25l"), "the cursor is there again"
            assert screen.now == screen.before
            assert "Traceback" not in screen.text


async def test_colours_can_be_left_out() -> None:
    async with fleet() as (run, [one, _]):
        with terminal("--admin", run.admin_url, NO_COLOR="1") as screen:
            process = await screen.run()
            await screen.until(one.name)
            screen.type("q")
            await process.wait()
            colours = {part.split("m")[0] for part in screen.text.split("\x1b[")[1:] if "38;2;" in part.split("m")[0]}
            parts = [colour.split("38;2;")[1].split(";")[:3] for colour in colours]
            assert all(len(set(part)) == 1 for part in parts), "shades of grey"


async def test_what_cannot_be_asked_is_an_error_on_a_terminal_too() -> None:
    with terminal("--admin", "http://127.0.0.1:9") as screen:
        process = await screen.run()
        assert await process.wait() == 1
        screen.read(0.1)
        assert "cannot be reached" in screen.text
        assert ALTERNATE not in screen.text


async def test_it_comes_back_when_its_gateway_is_restarted(tmp_path: Path) -> None:
    async with FakeReplica() as one:
        file, admin = tmp_path / "config.yaml", f"unix:{tmp_path}/admin.sock"
        config = {"pools": [{"replicas": [one.url]}], "listen": "127.0.0.1:0", "admin_listen": admin, "state": {"url": "off"}}
        file.write_text(yaml.safe_dump(config))
        command = ["serve", "--config", str(file)]
        first = Process("gateway", command)
        try:
            await asyncio.to_thread(first.wait_for, admin_url)
            async with opened(admin) as screen:
                await screen.shows("● live", one.name)
                await asyncio.to_thread(first.stop)
                await screen.shows("● not connected, trying again", one.name)
                second = Process("gateway", command)
                try:
                    await screen.shows("● live", one.name)
                    await screen.press("d", "y")
                    await screen.shows("draining")
                finally:
                    await asyncio.to_thread(second.stop)
        finally:
            await asyncio.to_thread(first.stop)
