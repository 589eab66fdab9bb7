"""One answer's bytes through three readers: what http1 takes, aiohttp's client and nginx read the same or refuse."""

from __future__ import annotations

from random import Random

import pytest

from scripts.fuzz import seeds
from scripts.fuzzing.diff import Row, compare_all, inputs, table
from tests.support.tools import tool


@pytest.mark.tools
async def test_what_is_taken_is_read_as_others_read_it() -> None:
    rows = await compare_all([*seeds("answers"), *inputs(Random(1), 400)], str(tool("nginx")))
    assert [row for row in rows if row.wrong] == []
    assert sum(row.ours is not None and row.nginx is not None and row.aiohttp is not None for row in rows) > 100
    assert "| the body's length is ambiguous or not a number | refuses | takes |" in table(rows, "nginx")


def test_what_counts_as_wrong() -> None:
    def row(ours: bytes | None, aiohttp: bytes | None, nginx: bytes | None, *, interim: bool = False) -> Row:
        return Row(b"", "", *((200, body) if body is not None else None for body in (ours, aiohttp, nginx)), interim)

    assert row(b"a", b"a", b"b").wrong
    assert row(b"a", None, b"b").wrong
    assert row(b"a", None, None).wrong
    assert not row(b"a", None, b"a").wrong
    assert not row(b"a", b"a", b"b", interim=True).wrong
    assert row(b"a", None, b"a", interim=True).wrong
    assert not row(None, b"a", b"b").wrong
