"""Who keeps a snapshot in a file."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.features.snapshots.file import read
from gateway.features.snapshots.frames import CLOCKS, Clocks
from gateway.features.snapshots.keeper import LAST_S, Keeper, SnapshotFile
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.snapshot import Header, Snapshot
from gateway.features.table import new_metrics


def keeper_of(path: Path, *, chunks: int, metrics: SnapshotMetrics, clocks: Clocks = CLOCKS, last_s: float = LAST_S) -> Keeper:
    async def collect() -> Snapshot:
        return Snapshot(Header("1/256", {}), [os.urandom(1 << 20)] * chunks, 1.0)

    return Keeper(SnapshotFile(path, 60.0), collect, metrics, clocks, last_s)


class SlowDisk:
    """A write, in its thread, waits until it goes on."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.clocks = replace(CLOCKS, boot=self._boot)

    def _boot(self) -> str:
        self.begun.set()
        self.goes_on.wait(40)
        return ""


async def test_the_last_one_waits_for_one_that_is_being_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics, disk = new_metrics().of(SnapshotMetrics), SlowDisk()
    keeper = keeper_of(tmp_path / "s", chunks=30, metrics=metrics, clocks=disk.clocks)
    for _ in range(5):
        disk.begun.clear()
        disk.goes_on.clear()
        writing = asyncio.create_task(keeper.write())
        assert await asyncio.to_thread(disk.begun.wait, 40)
        writing.cancel()
        last = asyncio.create_task(keeper.write_last())
        await asyncio.sleep(0)  # it has begun
        disk.goes_on.set()
        await last
    assert metrics.written.values == {("good",): 5, ("failed",): 0}
    assert len(read(tmp_path / "s").chunks) == 30
    assert os.listdir(tmp_path) == ["s"]
    assert not caplog.records


async def test_one_that_fails_when_nobody_waits_for_it_is_no_error_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, disk = tmp_path / "folder", SlowDisk()
    keeper = keeper_of(folder / "s", chunks=30, metrics=new_metrics().of(SnapshotMetrics), clocks=disk.clocks)
    writing = asyncio.create_task(keeper.write())
    assert await asyncio.to_thread(disk.begun.wait, 40)
    writing.cancel()
    shutil.rmtree(folder)
    disk.goes_on.set()
    await keeper.write_last()
    await keeper.write_last()
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert len(read(folder / "s").chunks) == 30


async def test_each_reason_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").mkdir()
    metrics = new_metrics().of(SnapshotMetrics)
    keeper = keeper_of(tmp_path / "taken", chunks=1, metrics=metrics)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await keeper.write()
            (tmp_path / "taken").rmdir()
            await keeper.write()
            (tmp_path / "taken").unlink()
            (tmp_path / "taken").mkdir()
    assert metrics.written.values == {("good",): 3, ("failed",): 3}
    assert [record.message for record in caplog.records] == ["snapshot not written"]


async def test_a_cold_start_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "s")
    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(20):
            assert await keeper_of(tmp_path / "s", chunks=1, metrics=new_metrics().of(SnapshotMetrics)).read() is None
    assert "snapshot ignored" in caplog.text


def test_a_disk_that_hangs_holds_up_neither_the_last_one_nor_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    goes_on = threading.Event()

    def boot() -> str:
        goes_on.wait()
        return ""

    async def keep() -> None:
        await keeper_of(
            tmp_path / "s", chunks=1, metrics=new_metrics().of(SnapshotMetrics), clocks=replace(CLOCKS, boot=boot), last_s=0.05
        ).write_last()

    try:
        ended = threading.Thread(target=lambda: asyncio.run(keep()))
        ended.start()
        ended.join(30)
        assert not ended.is_alive(), "the loop's end waits for no disk"
        assert caplog.messages == ["last snapshot not written in time"]
    finally:
        goes_on.set()


async def test_a_part_of_what_it_began_with_does_not_replace_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def collect() -> Snapshot:
        return Snapshot(Header("1/256", {}, partial=True), [b"x"], 1.0)

    keeper = Keeper(SnapshotFile(tmp_path / "s", 60.0), collect, new_metrics().of(SnapshotMetrics))
    with caplog.at_level(logging.INFO):
        await keeper.write_last()
    assert caplog.messages == ["snapshot file left unchanged"]
    assert not (tmp_path / "s").exists()


async def test_a_bug_in_collecting_is_counted(tmp_path: Path) -> None:
    async def collect() -> Snapshot:
        raise ZeroDivisionError

    metrics = new_metrics().of(SnapshotMetrics)
    with pytest.raises(ZeroDivisionError):
        await Keeper(SnapshotFile(tmp_path / "s", 60.0), collect, metrics).write()
    assert metrics.written.values[("failed",)] == 1
