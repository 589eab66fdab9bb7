"""SQLite finds turns by an index of few rows: the time does not grow with the number of all turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import sqlite

from gateway.features.histories import refs, turns
from tests.gateway.features.histories.conftest import file_url, opened

PARENTS = {"ended": ["i", "j"], "begun": ["k"]}
VALUES: dict[str, Any] = {"owner": "o", "head": "a", "id": "i", "now": 1.0, **PARENTS, "name": "n", "form": "chat"}
STATEMENTS = {
    "turns at a head": turns._AT,
    "what goes on": turns._NEXT,
    "a parent": turns._ALIVE,
    "a frame": turns._FRAME,
    "a head for a ref": refs._KEPT,
    "the number of refs": refs._COUNT,
}


@pytest.mark.parametrize("name", STATEMENTS)
async def test_no_statement_reads_all_turns(name: str, tmp_path: Path) -> None:
    plan = await plan_of(STATEMENTS[name], tmp_path)
    assert all(step.startswith("SEARCH") and "owner=?" in step for step in plan), plan


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_is_prepared_again_for_its_values(name: str) -> None:
    """SQLite does so if only the value of a parameter shows that an index of few rows fits."""
    assert "!= ?" not in str(STATEMENTS[name].compile(dialect=sqlite.dialect()))


async def test_what_goes_on_is_read_in_order_and_not_from_its_whole_tree(tmp_path: Path) -> None:
    """A log may have any number of turns after it, and a tree any number beside it."""
    plan = await plan_of(turns._NEXT.params(ended=["i"], begun=["k"]), tmp_path)
    assert [step.partition("(")[2] for step in plan] == ["owner=? AND input_head=?)", *["owner=? AND parent=?)"] * 2]


async def plan_of(statement: Any, tmp_path: Path) -> list[str]:
    """The steps of SQLite's plan that read tables."""
    parameters = {key: value for key, value in VALUES.items() if key in statement.compile().params}
    written = statement.params(**parameters).compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    async with opened(file_url(tmp_path / "a.sqlite")) as store:
        rows = await store.database.read(lambda connection: connection.execute(text(f"EXPLAIN QUERY PLAN {written}")).all())
    plan = [row[3] for row in rows if " warmroute_" in row[3]]
    assert plan
    return plan
