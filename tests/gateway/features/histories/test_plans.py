"""What goes on from a log is found by indexes of few rows: the time does not grow with the number of all turns."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import text
from sqlalchemy.dialects import sqlite

from gateway.features.histories import turns
from tests.gateway.features.histories.conftest import file_url, opened


async def test_what_goes_on_is_read_in_order_and_not_from_its_whole_tree(tmp_path: Path) -> None:
    """A log may have any number of turns after it, and a tree any number beside it."""
    statement = turns._NEXT.params(owner="o", head="a", now=1.0, ended=["i"], begun=["k"])
    written = statement.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    async with opened(file_url(tmp_path / "a.sqlite")) as store:
        rows = await store.database.read(lambda connection: connection.execute(text(f"EXPLAIN QUERY PLAN {written}")).all())
    plan = [row[3].partition("(")[2] for row in rows if " warmroute_" in row[3]]
    assert plan == ["owner=? AND input_head=?)", *["owner=? AND parent=?)"] * 2]
