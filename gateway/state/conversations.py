"""Conversations and their items, each its owner's alone, until they expire: `ttl_s` after the last items came.

What has expired is emptied by `Store.purge`. Reads never write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from gateway.state.database import Database
from gateway.state.records import Conversation, Expired, Item, TooLarge, Unknown
from gateway.state.tables import conversations, items

MAX_ITEMS: Final = 100_000  # of a conversation


class Conversations:
    """See the top of this file. ttl_s: seconds. clock: Unix seconds. All methods raise StoreFailed."""

    def __init__(self, database: Database, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._ttl_s = ttl_s
        self._clock = clock

    async def close(self) -> None:
        await self._database.close()

    async def create_conversation(self, conversation: Conversation, added: Sequence[Item]) -> None:
        now = self._clock()
        row = {
            "owner": conversation.owner,
            "id": conversation.id,
            "created_at": conversation.created_at,
            "metadata": conversation.metadata,
            "expires_at": now + self._ttl_s,
            "emptied": 0,
        }

        def work(connection: Connection) -> None:
            connection.execute(insert(conversations).values(row))
            self._extend(connection, conversation.owner, conversation.id, added, now)

        await self._database.write(work)

    async def conversation(self, owner: str, id_: str) -> Conversation:
        """Raises Unknown or Expired."""
        query = select(conversations).where(_of(owner, id_))

        def work(connection: Connection) -> Any:
            return connection.execute(query).one_or_none()

        row = await self._database.read(work)
        self._require(row, id_)
        return Conversation(owner=owner, id=id_, created_at=row.created_at, metadata=row.metadata)

    async def describe(self, owner: str, id_: str, metadata: bytes) -> None:
        """Give a conversation this metadata. Raises Unknown or Expired."""

        def work(connection: Connection) -> None:
            self._lock(connection, owner, id_)
            connection.execute(update(conversations).where(_of(owner, id_)).values(metadata=metadata))

        await self._database.write(work)

    async def delete_conversation(self, owner: str, id_: str) -> bool:
        """With its items. False: there is none."""

        def work(connection: Connection) -> bool:
            try:
                self._lock(connection, owner, id_)
            except (Unknown, Expired):
                return False
            connection.execute(delete(items).where(items.c.owner == owner, items.c.conversation == id_))
            connection.execute(delete(conversations).where(_of(owner, id_)))
            return True

        return await self._database.write(work)

    async def add(self, owner: str, id_: str, added: Sequence[Item]) -> None:
        """Items at the conversation's end. Raises Unknown, Expired or TooLarge."""
        now, again = self._clock(), False

        def work(connection: Connection) -> None:
            nonlocal again
            self._extend(connection, owner, id_, added, now, again=again)
            again = True

        await self._database.write(work)

    async def items(
        self, owner: str, id_: str, *, limit: int, after: str = "", descending: bool = False
    ) -> tuple[list[Item], bool]:
        """(items, whether there are more). after: an item's id. Raises Unknown (also for `after`) or Expired."""
        position = items.c.position

        def work(connection: Connection) -> tuple[Any, Sequence[Any] | None]:
            found = connection.execute(select(conversations).where(_of(owner, id_))).one_or_none()
            query = select(items.c.id, items.c.item).where(items.c.owner == owner, items.c.conversation == id_)
            if after:
                start = connection.execute(select(position).where(_item(owner, id_, after)).limit(1)).scalar()
                if start is None:
                    return found, None
                query = query.where(position < start if descending else position > start)
            query = query.order_by(position.desc() if descending else position).limit(limit + 1)
            return found, connection.execute(query).all()

        found, rows = await self._database.read(work)
        self._require(found, id_)
        if rows is None:
            raise Unknown(after)
        return [Item(row.id, row.item) for row in rows[:limit]], len(rows) > limit

    async def item(self, owner: str, id_: str, item_id: str) -> Item:
        """Raises Unknown or Expired."""

        def work(connection: Connection) -> tuple[Any, Any]:
            found = connection.execute(select(conversations).where(_of(owner, id_))).one_or_none()
            return found, connection.execute(select(items.c.item).where(_item(owner, id_, item_id))).scalars().first()

        found, item = await self._database.read(work)
        self._require(found, id_)
        if item is None:
            raise Unknown(item_id)
        return Item(item_id, item)

    async def delete_item(self, owner: str, id_: str, item_id: str) -> None:
        """Raises Unknown or Expired."""

        def work(connection: Connection) -> None:
            self._lock(connection, owner, id_)
            if not connection.execute(delete(items).where(_item(owner, id_, item_id))).rowcount:
                raise Unknown(item_id)

        await self._database.write(work)

    async def conversation_input(self, owner: str, id_: str, most: int) -> list[bytes]:
        """All items, the oldest first. most: bytes. Raises Unknown, Expired or TooLarge."""
        mine = and_(items.c.owner == owner, items.c.conversation == id_)
        sizes = select(func.count(), func.coalesce(func.sum(func.length(items.c.item)), 0)).where(mine)
        query = select(items.c.item).where(mine).order_by(items.c.position)

        def work(connection: Connection) -> tuple[Any, int, int, Sequence[bytes]]:
            found = connection.execute(select(conversations).where(_of(owner, id_))).one_or_none()
            count, size = connection.execute(sizes).one()
            if size > most:
                return found, count, size, ()
            return found, count, size, connection.execute(query).scalars().all()

        found, count, size, rows = await self._database.read(work)
        self._require(found, id_)
        if size > most:
            raise TooLarge(size, count)
        return list(rows)

    def _require(self, row: Any, id_: str) -> None:
        """Raises Unknown or Expired. row: with expires_at and emptied."""
        if row is None:
            raise Unknown(id_)
        if row.emptied or row.expires_at <= self._clock():
            raise Expired(id_, self._ttl_s)

    def _lock(self, connection: Connection, owner: str, id_: str) -> None:
        """For this transaction. Raises Unknown or Expired."""
        query = select(conversations.c.expires_at, conversations.c.emptied).where(_of(owner, id_)).with_for_update()
        self._require(connection.execute(query).one_or_none(), id_)

    def _extend(
        self, connection: Connection, owner: str, id_: str, added: Sequence[Item], now: float, *, again: bool = False
    ) -> None:
        """again: the transaction may have been done before, and only its confirmation was lost."""
        self._lock(connection, owner, id_)
        connection.execute(update(conversations).where(_of(owner, id_)).values(expires_at=now + self._ttl_s))
        if not added or (again and all(_is_there(connection, owner, id_, each) for each in (added[0], added[-1]))):
            return
        query = select(func.max(items.c.position), func.count()).where(items.c.owner == owner, items.c.conversation == id_)
        last, count = connection.execute(query).one()
        if count + len(added) > MAX_ITEMS:
            raise TooLarge(0, count)
        first = 0 if last is None else last + 1
        rows = [
            {"owner": owner, "conversation": id_, "position": first + at, "id": each.id, "item": each.item}
            for at, each in enumerate(added)
        ]
        connection.execute(insert(items), rows)


def _of(owner: str, id_: str) -> Any:
    return and_(conversations.c.owner == owner, conversations.c.id == id_)


def _item(owner: str, conversation: str, id_: str) -> Any:
    return and_(items.c.owner == owner, items.c.conversation == conversation, items.c.id == id_)


def _is_there(connection: Connection, owner: str, conversation: str, sought: Item) -> bool:
    query = select(items.c.item).where(_item(owner, conversation, sought.id))
    return sought.item in connection.execute(query).scalars()
