"""What has expired, some of it at a time: emptied first, and long after that forgotten."""

from __future__ import annotations

from typing import Final

from sqlalchemy import delete, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.state import names
from gateway.state.tables import conversations, items, responses

TOMBSTONE_S: Final = 7 * 86_400.0
_AT_ONCE: Final = 500  # rows


async def emptied(connection: AsyncConnection, now: float) -> int:
    """How many were emptied. Conversations lose their items."""
    gone = 0
    for table, values in (
        (responses, {"input": b"", "output": b"", "response": b""}),
        (conversations, {"metadata": b"{}"}),
    ):
        key = tuple_(table.c.owner, table.c.id)
        query = select(table.c.owner, table.c.id).where(table.c.emptied == 0, table.c.expires_at <= now).limit(_AT_ONCE)
        rows = [tuple(row) for row in (await connection.execute(query)).all()]
        if not rows:
            continue
        if table is conversations:
            await connection.execute(delete(items).where(tuple_(items.c.owner, items.c.conversation).in_(rows)))
        else:
            await names.remove(connection, rows)
        await connection.execute(update(table).where(key.in_(rows)).values(emptied=1, **values))
        gone += len(rows)
    return gone


async def forgotten(connection: AsyncConnection, before: float) -> int:
    gone = 0
    for table in (responses, conversations):
        query = select(table.c.owner, table.c.id).where(table.c.emptied == 1, table.c.expires_at <= before)
        rows = [tuple(row) for row in (await connection.execute(query.limit(_AT_ONCE))).all()]
        if rows:
            await connection.execute(delete(table).where(tuple_(table.c.owner, table.c.id).in_(rows)))
            gone += len(rows)
    return gone
