"""The look at a store without its libraries."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from gateway.features.workflows.background.unfinished import may_have_runs
from tests.gateway.features.histories.conftest import Clock, file_url
from tests.gateway.features.workflows.background.test_store import KEY, NO_KEY, new_run, store_at


async def test_a_file_has_runs_until_they_have_ended(tmp_path: Path) -> None:
    path, url = tmp_path / "a b.sqlite", file_url(tmp_path / "a%20b.sqlite")
    assert not may_have_runs(url)
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("create table other (x)")
    assert not may_have_runs(url)
    async with store_at(url, Clock()) as store:
        assert not may_have_runs(url)
        await store.begin(new_run(), "one", NO_KEY)
        assert may_have_runs(url)
        assert await store.finish(KEY, "one", "completed", b"{}", 1)
        assert not may_have_runs(url)


@pytest.mark.parametrize("url", ["postgresql://u@h/db", "sqlite+other://x"])
def test_other_databases_are_looked_at_by_their_store(url: str) -> None:
    assert may_have_runs(url)
