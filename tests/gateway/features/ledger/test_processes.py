"""Real gateways with a ledger: killed under load, a Postgres that stops, a disk that is full, files that are unfit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.measure.ports import free_port
from gateway.features.ledger.ledger import FLUSH_S
from tests.chaos.stage import Child, until
from tests.gateway.features.ledger.conftest import file_url, stored
from tests.gateway.features.ledger.test_store import check
from tests.support.fakes import FakeReplica, answers
from tests.support.postgres import PASSWORD, Postgres, postgres
from tests.support.tiers import gate

PRICES = {"m": {"input": 1.0, "cached_input": 0.1, "output": 2.0}}
COST = 60 * 10**6 + 40 * 10**5 + 7 * 2 * 10**6  # picodollars
LANES = 8
SLACK_S = 0.5  # of a machine that is busy, for one transaction


@dataclass
class Load:
    """Lanes that ask one after the other. answered: (moment, id) of good answers; others: of all others."""

    url: str
    answered: list[tuple[float, str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        numbers = itertools.count()
        tasks = [asyncio.create_task(self._lane(numbers)) for _ in range(LANES)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(120):
            while len(self.answered) < count:
                self.more.clear()
                await self.more.wait()

    async def _lane(self, numbers: Any) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                id_ = f"c-{next(numbers)}"
                body = {"model": "m", "messages": [{"role": "user", "content": "hello " * 50}], "user": id_}  # adopts nothing
                headers = {"x-request-id": id_}
                try:
                    async with session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
                        await answer.read()
                        if answer.status != 200:
                            self.others.append(id_)
                            continue
                        self.answered.append((time.monotonic(), id_))
                        self.more.set()
                except (aiohttp.ClientError, OSError):
                    self.others.append(id_)
                    await asyncio.sleep(0.01)  # the gateway is gone


def replica() -> FakeReplica:
    return FakeReplica([answers(prompt=100, completion=7, cached=40)])


async def started(
    folder: Path, ends: contextlib.ExitStack, one: FakeReplica, url: str, workers: int = 1, prefix: str = ""
) -> tuple[Child, str]:
    port = free_port()
    config = {
        "listen": f"127.0.0.1:{port}",
        "log_level": "warning",  # requests have no lines: the log would be full before the ledger is
        "admin_listen": "off",
        "metrics_listen": "127.0.0.1:0",
        "state": {"url": "off"},
        "pools": [{"replicas": [one.url]}],
        "prices": PRICES,
        "workers": workers,
        "snapshot": {"file": "off"},
        "ledger": {"url": url},
        "limits": {"drain_accept_s": 0, "drain_timeout_s": 5},
    }
    file = folder / "c.yaml"
    file.write_text(json.dumps(config))
    arguments = [
        "-c",
        f"{prefix}\nfrom gateway.commands.cli import main\nraise SystemExit(main(['serve', '--config', {str(file)!r}]))",
    ]
    child = Child(folder / "log", ends, *arguments)

    async def ready() -> bool:
        assert child.process.poll() is None, child.lines
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/ready") as answer:
                return answer.status == 200
        return False

    await until(ready, lambda: child.lines)
    return child, f"http://127.0.0.1:{port}"


async def rows_of(url: str) -> list[dict[str, Any]]:
    async with stored(url) as (_, database):
        return await check(database)


def require_right(found: list[dict[str, Any]]) -> None:
    """Each of the good ones is whole, and what it has cost is what the engine has reported."""
    ids = [row["request"] for row in found if row["status"] == 200]
    assert len(ids) == len(set(ids)), "doubled"
    for row in found:
        if row["status"] == 200:
            assert (row["prompt"], row["cached"], row["completion"], row["estimated"]) == (100, 40, 7, "")
            assert row["input"] + row["cached_input"] + row["output"] == COST


async def integrity(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize("workers", [1, 2])
@gate("2", reason="one worker: test_a_stop_under_load_loses_nothing")
async def test_a_kill_under_load_loses_the_last_second_at_most(tmp_path: Path, workers: int) -> None:
    url = file_url(tmp_path / "ledger.sqlite")
    async with replica() as one:
        with contextlib.ExitStack() as ends:
            child, base = await started(tmp_path, ends, one, url, workers)
            load = Load(base)
            async with load.going():
                await load.until(6000)
                killed = time.monotonic()
                for pid in [*child_pids(child), child.process.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await child.exit_status()
    found = await rows_of(url)
    await integrity(tmp_path / "ledger.sqlite")
    require_right(found)
    there = {row["request"] for row in found}
    missing = [killed - at for at, id_ in load.answered if id_ not in there and at <= killed]
    assert max(missing, default=0.0) <= FLUSH_S + SLACK_S
    assert len(there) > 500


def child_pids(child: Child) -> list[int]:
    """Workers: the supervisor's children."""
    path = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children")
    return [int(pid) for pid in path.read_text("ascii").split()]


async def test_a_stop_under_load_loses_nothing(tmp_path: Path) -> None:
    url = file_url(tmp_path / "ledger.sqlite")
    async with replica() as one:
        with contextlib.ExitStack() as ends:
            child, base = await started(tmp_path, ends, one, url, 2)
            load = Load(base)
            async with load.going():
                await load.until(800)
                child.signal(signal.SIGTERM)
                await child.exit_status()
    found = await rows_of(url)
    require_right(found)
    assert {id_ for _, id_ in load.answered} <= {row["request"] for row in found}


@pytest.mark.tools
async def test_a_postgres_that_restarts_under_load_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres() as server:
        url = server.new()
        async with replica() as one:
            with contextlib.ExitStack() as ends:
                monkeypatch.setenv("PGPASSWORD", PASSWORD)
                child, base = await started(tmp_path, ends, one, url.replace(f":{PASSWORD}", ""))
                load = Load(base)
                async with load.going():
                    await load.until(400)
                    for number in (1, 2):
                        await outage(server, load, child, number)
                    await load.until(len(load.answered) + 300)
                child.signal(signal.SIGTERM)
                await child.exit_status()
        assert not load.others, "serving goes on, untouched"
        found = await rows_of(url)
    require_right(found)
    assert {id_ for _, id_ in load.answered} <= {row["request"] for row in found}
    assert (count_of(child, CANNOT), count_of(child, AGAIN)) == (2, 2)


CANNOT = "the ledger cannot be written: requests are served, and their usage waits in memory"
AGAIN = "the ledger is written again"


def count_of(child: Child, message: str) -> int:
    return sum(message in line for line in child.lines)


async def outage(server: Postgres, load: Load, child: Child, number: int) -> None:
    """Under load, until the gateway has noticed, and until it has noticed the end."""
    server.stop()
    await child.wait_for_line(lambda _line: count_of(child, CANNOT) >= number)
    await load.until(len(load.answered) + 200)
    server.start()
    await child.wait_for_line(lambda _line: count_of(child, AGAIN) >= number)


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, -1))
"""
# Root may write whatever the permissions say, unless it gives that right up.
PERMISSIONS_COUNT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
if libc.capget(header, sets) == 0:
    for each in (0, 1, 2):
        sets[each] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
"""
WATCH = """
import atexit, sys
atexit.register(lambda: print("LOADED" if "sqlalchemy" in sys.modules else "NOT LOADED", file=sys.stderr))
"""


async def test_a_full_disk_stops_the_ledger_and_no_request(tmp_path: Path) -> None:
    url = file_url(tmp_path / "ledger.sqlite")
    async with replica() as one:
        with contextlib.ExitStack() as ends:
            child, base = await started(tmp_path, ends, one, url, prefix=FULL)
            load = Load(base)
            async with load.going():
                await load.until(2500)
                await child.wait_for_line(lambda line: CANNOT in line)
                await load.until(len(load.answered) + 300)
            assert not load.others
            child.signal(signal.SIGTERM)
            await child.exit_status()
    assert any("usage is lost" in line for line in child.lines)
    found = await rows_of(url)
    require_right(found)
    assert 0 < len(found) < len(load.answered)
    assert sum(CANNOT in line for line in child.lines) == 1


@pytest.mark.parametrize("content", [b"", b"this is no database, and nobody may write over it" * 100])
async def test_a_file_that_is_unfit_is_named_at_the_start_and_serving_goes_on(tmp_path: Path, content: bytes) -> None:
    """A directory of that name, or a file of something else."""
    path = tmp_path / "ledger.sqlite"
    if content:
        path.write_bytes(content)
    else:
        path.mkdir()
    async with replica() as one:
        with contextlib.ExitStack() as ends:
            child, base = await started(tmp_path, ends, one, file_url(path))
            await child.wait_for_line(lambda line: CANNOT in line and ("not a database" in line or "directory" in line))
            load = Load(base)
            async with load.going():
                await load.until(50)
            assert not load.others
    if content:
        assert path.read_bytes() == content


async def test_what_waited_for_a_file_is_written_when_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.mkdir()
    async with replica() as one:
        with contextlib.ExitStack() as ends:
            child, base = await started(tmp_path, ends, one, file_url(path))
            load = Load(base)
            async with load.going():
                await child.wait_for_line(lambda line: CANNOT in line)
                await load.until(100)
                path.rmdir()
                await child.wait_for_line(lambda line: AGAIN in line)
            child.signal(signal.SIGTERM)
            await child.exit_status()
    assert {id_ for _, id_ in load.answered} <= {row["request"] for row in await rows_of(file_url(path))}


async def test_a_file_that_becomes_read_only_stops_the_ledger_loudly_and_no_request(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    path = folder / "ledger.sqlite"
    async with stored(file_url(path)):
        """It is made."""
    for each in folder.iterdir():
        each.chmod(0o444)
    folder.chmod(0o555)
    async with replica() as one:
        with contextlib.ExitStack() as ends:
            child, base = await started(tmp_path, ends, one, file_url(path), prefix=PERMISSIONS_COUNT)
            load = Load(base)
            async with load.going():
                await child.wait_for_line(lambda line: CANNOT in line and "Permission denied" in line)
                await load.until(len(load.answered) + 100)
                folder.chmod(0o755)
                for each in folder.iterdir():
                    each.chmod(0o644)
                await child.wait_for_line(lambda line: AGAIN in line)
            assert not load.others
            child.signal(signal.SIGTERM)
            await child.exit_status()
    assert count_of(child, CANNOT) == 1
    assert {id_ for _, id_ in load.answered} <= {row["request"] for row in await rows_of(file_url(path))}


async def test_without_a_ledger_no_database_is_loaded(tmp_path: Path) -> None:
    async with replica() as one:
        with contextlib.ExitStack() as ends:
            child, base = await started(tmp_path, ends, one, "off", prefix=WATCH)
            load = Load(base)
            async with load.going():
                await load.until(20)
            child.signal(signal.SIGTERM)
            await child.exit_status()
    assert "NOT LOADED" in child.lines
