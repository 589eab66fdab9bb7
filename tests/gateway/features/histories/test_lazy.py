"""The store, opened when it is needed first."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gateway.database.failures import StoreFailed
from gateway.features.histories.lazy import RETRY_S, LazyStore
from gateway.features.histories.store import HistoryStore
from tests.gateway.conftest import eventually, running
from tests.gateway.features.histories.conftest import Clock, response
from tests.support.fakes import FakeReplica, answers
from tests.support.paths import ROOT


def nothing() -> None:
    pass


def load() -> type[HistoryStore]:
    return HistoryStore


def test_a_gateway_that_keeps_nothing_does_not_load_it() -> None:
    code = "import sys, gateway.app; print([name for name in sys.modules if name.startswith(('sqlalchemy', 'sqlite3'))])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_it_is_opened_once_and_closed(tmp_path: Path) -> None:
    lazy = LazyStore(load, f"sqlite:///{tmp_path}/a.sqlite", 100.0, nothing)
    assert not os.listdir(tmp_path)
    store = await lazy.get()
    assert await lazy.get() is store
    await store.put(response("a"))
    await lazy.close()
    await lazy.close()
    assert (await (await lazy.get()).get("o", "a")).id == "a", "it opens again"
    await lazy.close()


async def test_work_that_can_do_without_it_does_not_wait_for_long(tmp_path: Path) -> None:
    slow = threading.Event()

    def loads() -> type[HistoryStore]:
        slow.wait()
        return HistoryStore

    lazy = LazyStore(loads, f"sqlite:///{tmp_path}/a.sqlite", 100.0, nothing, late_s=0.01)
    lazy.begin()
    waits = asyncio.create_task(lazy.get())
    try:
        for _ in range(2):
            with pytest.raises(StoreFailed, match="takes longer"):
                await lazy.get_soon()
        assert not waits.done()
    finally:
        slow.set()
    assert await waits is await lazy.get_soon() is await lazy.get(), "it was opened once"
    await lazy.close()


async def test_a_long_opening_goes_on_without_its_callers_and_ends_with_the_gateway(tmp_path: Path) -> None:
    slow = threading.Event()

    def loads() -> type[HistoryStore]:
        slow.wait()
        return HistoryStore

    lazy = LazyStore(loads, f"sqlite:///{tmp_path}/a.sqlite", 100.0, nothing)
    lazy.open_s = 0.01
    try:
        for _ in range(2):
            with pytest.raises(StoreFailed, match="takes longer"):
                await lazy.get()
        await lazy.close()
    finally:
        slow.set()
    assert not lazy.is_open
    lazy.open_s = 100.0
    assert await lazy.get()
    await lazy.close()


async def test_a_default_store_that_was_used_is_opened_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lazy = LazyStore(load, "sqlite", 100.0, nothing)
    await lazy.open_used()
    assert not lazy.is_open
    assert not os.listdir(tmp_path)
    await lazy.get()
    await lazy.close()
    again = LazyStore(load, "sqlite", 100.0, nothing)
    await again.open_used()
    assert again.is_open
    await again.close()


async def test_a_store_that_the_configuration_names_is_opened_at_the_start(tmp_path: Path) -> None:
    """Its first turns are kept."""
    lazy = LazyStore(load, f"sqlite:///{tmp_path}/a.sqlite", 100.0, nothing)
    await lazy.open_used()
    assert lazy.is_open
    await lazy.close()


async def test_a_gateway_opens_the_store_that_was_used_before_its_first_request(tmp_path: Path) -> None:
    state = {"state": {"url": f"sqlite:///{tmp_path}/a.sqlite"}}
    async with FakeReplica([answers()]) as replica:
        for _ in range(2):
            async with running(replica, **state) as run:
                store = run.gateway[LazyStore]
                if (tmp_path / "a.sqlite").exists():
                    await eventually(lambda: store.is_open)  # noqa: B023
                else:
                    assert not store.is_open
                await store.get()


async def test_what_failed_is_tried_again_after_a_pause(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    clock = Clock()
    lazy = LazyStore(load, f"sqlite:///{tmp_path}/file/a.sqlite", 100.0, nothing, pause_clock=clock)
    with pytest.raises(StoreFailed, match="file"):
        await lazy.get()
    (tmp_path / "file").unlink()
    with pytest.raises(StoreFailed, match="file"):
        await lazy.get()
    clock.now += RETRY_S
    assert await lazy.get()
    await lazy.close()
