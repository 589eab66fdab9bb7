"""Several processes on one file, and processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from gateway.database.failures import StoreError, StoreFailed
from tests.gateway.features.histories.conftest import file_url, opened, response
from tests.support.paths import ROOT

# Puts a response after the other, four at once, and says of each when it is acknowledged.
WRITER = """
import asyncio, sys
from tests.gateway.features.histories.conftest import opened, response

async def lane(store, name):
    parent = ""
    for number in range(int(sys.argv[3])):
        id_ = f"{name}-{number}"
        await store.put(response(id_, parent, size=2000))
        print(id_, flush=True)
        parent = id_

async def main():
    async with opened(sys.argv[1]) as store:
        await asyncio.gather(*(lane(store, f"{sys.argv[2]}{at}") for at in range(4)))

asyncio.run(main())
"""


async def writer(url: str, name: str, count: int) -> asyncio.subprocess.Process:
    arguments = sys.executable, "-c", WRITER, url, name, str(count)
    return await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE)


async def acknowledged(process: asyncio.subprocess.Process, most: int) -> list[str]:
    assert process.stdout
    lines = list[str]()
    while len(lines) < most and (line := await process.stdout.readline()):
        lines.append(line.decode().strip())
    return lines


@pytest.mark.parametrize("seed", range(3))
async def test_what_was_acknowledged_outlives_a_kill(url: str, seed: int) -> None:
    process = await writer(url, "w", 100_000)
    try:
        before = await acknowledged(process, random.Random(seed).randrange(50, 400))
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert process.stdout
    before += [line for line in (await process.stdout.read()).decode().split("\n")[:-1] if line]
    async with opened(url) as store:
        for id_ in before:
            lane, _, number = id_.partition("-")
            parent = f"{lane}-{int(number) - 1}" if int(number) else ""
            assert await store.get("o", id_) == response(id_, parent, size=2000)
        for lane in range(4):
            last = max((int(id_.partition("-")[2]) for id_ in before if id_.startswith(f"w{lane}-")), default=-1)
            if last >= 0:
                chain = await store.chain("o", f"w{lane}-{last}", 1 << 30)
                assert len(chain) == last + 1


async def test_two_processes_share_a_file(url: str) -> None:
    processes = [await writer(url, name, 40) for name in "xy"]  # both make the tables
    try:
        async with opened(url) as store:
            lines = await asyncio.gather(*(acknowledged(process, 160) for process in processes))
            assert [len(each) for each in lines] == [160, 160]
            for id_ in lines[0] + lines[1]:
                await store.get("o", id_)
            await store.put(response("here", "x0-39"))
            assert len(await store.chain("o", "here", 1 << 30)) == 41
            with pytest.raises(StoreError):
                await store.get("o", "x9-0")
    finally:
        codes = [await process.wait() for process in processes]
    assert codes == [0, 0]


async def test_a_file_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        asyncio.get_running_loop().call_later(0.3, other.execute, "COMMIT")  # where this is too early, the test shows less
        async with opened(file_url(path)) as store:
            await store.put(response("here"))
            assert await store.get("o", "here") == response("here")


async def test_one_that_another_process_never_leaves_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreFailed, match="locked"):
            async with opened(file_url(path)):
                pass
