"""Conversations and their items, by owner, until they expire: `ttl_s` after the last added items.

`Store.purge` empties expired conversations. Reads never write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from gateway.database.database import Database
from gateway.features.histories.records import (
    Charge,
    ExpiredObjectError,
    HistoryTooLargeError,
    Item,
    ItemRange,
    StoredConversation,
    UnknownObjectError,
    free,
)
from gateway.features.histories.sizes import StoredSizes, release
from gateway.features.histories.tables import ROW, conversations, items

MAX_ITEMS: Final = 100_000  # per conversation


class ConversationStore:
    """Reads and writes conversations. ttl_s: seconds. clock: Unix seconds. sizes: bounds them; default: without a maximum. All
    methods raise StoreFailed; methods that add something also StoreFullError.
    """

    def __init__(
        self,
        database: Database,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
        sizes: StoredSizes | None = None,
    ) -> None:
        self._database = database
        self._sizes = sizes or StoredSizes()
        self._ttl_s = ttl_s
        self._clock = clock

    @property
    def database(self) -> Database:
        """The database, for stores of features with tables in the same schema."""
        return self._database

    @property
    def sizes(self) -> StoredSizes:
        """The bound on all stored bytes."""
        return self._sizes

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    async def close(self) -> None:
        await self._database.close()

    async def create_conversation(self, conversation: StoredConversation, added: Sequence[Item]) -> None:
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
            self._sizes.add(connection, conversation.owner, len(conversation.metadata) + ROW)
            self._extend(connection, conversation.owner, conversation.id, added, now)

        await self._database.write(work)

    async def conversation(self, owner: str, id_: str) -> StoredConversation:
        """A conversation. Raises UnknownObjectError or ExpiredObjectError."""
        query = select(conversations).where(_of(owner, id_))

        def work(connection: Connection) -> Any:
            return connection.execute(query).one_or_none()

        row = await self._database.read(work)
        self._require(row, id_)
        return StoredConversation(owner=owner, id=id_, created_at=row.created_at, metadata=row.metadata)

    async def set_metadata(self, owner: str, id_: str, metadata: bytes) -> None:
        """Set the metadata of a conversation. Raises UnknownObjectError or ExpiredObjectError."""

        def work(connection: Connection) -> None:
            self._lock(connection, owner, id_)
            release(connection, conversations, _of(owner, id_))
            self._sizes.add(connection, owner, len(metadata) + ROW)
            connection.execute(update(conversations).where(_of(owner, id_)).values(metadata=metadata))

        await self._database.write(work)

    async def delete_conversation(self, owner: str, id_: str) -> bool:
        """Delete a conversation and its items. False: there is none."""

        def work(connection: Connection) -> bool:
            try:
                self._lock(connection, owner, id_)
            except (UnknownObjectError, ExpiredObjectError):
                return False
            mine = and_(items.c.owner == owner, items.c.conversation == id_)
            release(connection, items, mine)
            release(connection, conversations, _of(owner, id_))
            connection.execute(delete(items).where(mine))
            connection.execute(delete(conversations).where(_of(owner, id_)))
            return True

        return await self._database.write(work)

    async def add(self, owner: str, id_: str, added: Sequence[Item]) -> None:
        """Add items at the conversation's end. Raises UnknownObjectError, ExpiredObjectError or HistoryTooLargeError."""
        now = self._clock()
        at: int | None = None

        def work(connection: Connection) -> None:
            nonlocal at
            at = self._extend(connection, owner, id_, added, now, at)

        await self._database.write(work)

    async def items(
        self, owner: str, id_: str, range_: ItemRange, max_bytes: int, charge: Charge = free
    ) -> tuple[list[Item], bool]:
        """A page of items, and whether more follow. max_bytes: of the page, except for a single larger item. charge: called
        with the size before the items are read. Raises UnknownObjectError (also for `after`), ExpiredObjectError, and the
        errors of `charge`.
        """
        position, mine = items.c.position, and_(items.c.owner == owner, items.c.conversation == id_)
        order = position.desc() if range_.descending else position

        def sizes(connection: Connection) -> tuple[Any, Sequence[Any] | None]:
            found = connection.execute(select(conversations).where(_of(owner, id_))).one_or_none()
            query = select(position, func.length(items.c.item).label("size")).where(mine)
            if range_.after:
                # If an id occurs twice, the page begins after the last one. Otherwise paging would not end.
                beyond = func.min(position) if range_.descending else func.max(position)
                start = connection.execute(select(beyond).where(_item(owner, id_, range_.after))).scalar()
                if start is None:
                    return found, None
                query = query.where(position < start if range_.descending else position > start)
            return found, connection.execute(query.order_by(order).limit(range_.limit + 1)).all()

        found, rows = await self._database.read(sizes)
        self._require(found, id_)
        if rows is None:
            raise UnknownObjectError(range_.after)
        fit = [size for size in accumulate(row.size for row in rows[: range_.limit]) if size <= max_bytes]
        count = max(1, len(fit)) if rows else 0
        if not count:
            return [], False
        charge(fit[-1] if fit else rows[0].size)
        low, high = sorted([rows[0].position, rows[count - 1].position])
        query = select(items.c.id, items.c.item).where(mine, position.between(low, high)).order_by(order)
        read = await self._database.read(lambda connection: connection.execute(query).all())
        return [Item(row.id, row.item) for row in read], len(rows) > count

    async def item(self, owner: str, id_: str, item_id: str, charge: Charge = free) -> Item:
        """Raises UnknownObjectError, ExpiredObjectError, and the errors of `charge`."""
        one = _item(owner, id_, item_id)

        def size_of(connection: Connection) -> tuple[Any, int | None]:
            found = connection.execute(select(conversations).where(_of(owner, id_))).one_or_none()
            return found, connection.execute(select(func.length(items.c.item)).where(one).limit(1)).scalar()

        found, size = await self._database.read(size_of)
        self._require(found, id_)
        if size is None:
            raise UnknownObjectError(item_id)
        charge(size)
        query = select(items.c.item).where(one).limit(1)
        item = await self._database.read(lambda connection: connection.execute(query).scalar())
        if item is None:
            raise UnknownObjectError(item_id)
        return Item(item_id, item)

    async def delete_item(self, owner: str, id_: str, item_id: str) -> None:
        """Raises UnknownObjectError or ExpiredObjectError."""

        def work(connection: Connection) -> None:
            self._lock(connection, owner, id_)
            release(connection, items, _item(owner, id_, item_id))
            if not connection.execute(delete(items).where(_item(owner, id_, item_id))).rowcount:
                raise UnknownObjectError(item_id)

        await self._database.write(work)

    async def conversation_input(self, owner: str, id_: str, max_bytes: int) -> list[bytes]:
        """All items, the oldest first. Raises UnknownObjectError, ExpiredObjectError, or HistoryTooLargeError beyond
        max_bytes.
        """
        mine = and_(items.c.owner == owner, items.c.conversation == id_)
        sizes = select(func.count(), func.coalesce(func.sum(func.length(items.c.item)), 0)).where(mine)
        query = select(items.c.item).where(mine).order_by(items.c.position)

        def work(connection: Connection) -> tuple[Any, int, int, Sequence[bytes]]:
            found = connection.execute(select(conversations).where(_of(owner, id_))).one_or_none()
            count, size = connection.execute(sizes).one()
            if size > max_bytes:
                return found, count, size, ()
            return found, count, size, connection.execute(query).scalars().all()

        found, count, size, rows = await self._database.read(work)
        self._require(found, id_)
        if size > max_bytes:
            raise HistoryTooLargeError(size, count)
        return list(rows)

    def _require(self, row: Any, id_: str) -> None:
        """Checks a row with expires_at and emptied. Raises UnknownObjectError or ExpiredObjectError."""
        if row is None:
            raise UnknownObjectError(id_)
        if row.emptied or row.expires_at <= self._clock():
            raise ExpiredObjectError(id_, self._ttl_s, row.expires_at)

    def _lock(self, connection: Connection, owner: str, id_: str) -> None:
        """Lock a conversation in this transaction. Raises UnknownObjectError or ExpiredObjectError."""
        query = select(conversations.c.expires_at, conversations.c.emptied).where(_of(owner, id_)).with_for_update()
        self._require(connection.execute(query).one_or_none(), id_)

    def _extend(
        self, connection: Connection, owner: str, id_: str, added: Sequence[Item], now: float, before: int | None = None
    ) -> int | None:
        """Add items at the end. Returns the position of the first one, None if there are none.

        before: the earlier result, if the write is repeated. If the first item is at that position, the earlier write was
        committed, and nothing is added.
        """
        self._lock(connection, owner, id_)
        connection.execute(update(conversations).where(_of(owner, id_)).values(expires_at=now + self._ttl_s))
        if not added:
            return None
        mine = and_(items.c.owner == owner, items.c.conversation == id_)
        if before is not None:
            there = select(items.c.id, items.c.item).where(mine, items.c.position == before)
            if (row := connection.execute(there).one_or_none()) and Item(row.id, row.item) == added[0]:
                return before
        last, count = connection.execute(select(func.max(items.c.position), func.count()).where(mine)).one()
        if count + len(added) > MAX_ITEMS:
            raise HistoryTooLargeError(0, count)
        first = 0 if last is None else last + 1
        rows = [
            {"owner": owner, "conversation": id_, "position": first + at, "id": each.id, "item": each.item}
            for at, each in enumerate(added)
        ]
        connection.execute(insert(items), rows)
        self._sizes.add(connection, owner, sum([len(each.item) + ROW for each in added]))
        return first


def _of(owner: str, id_: str) -> Any:
    """Condition for a conversation; a row with a head is a ref."""
    return and_(conversations.c.owner == owner, conversations.c.id == id_, conversations.c.head == "")


def _item(owner: str, conversation: str, id_: str) -> Any:
    return and_(items.c.owner == owner, items.c.conversation == conversation, items.c.id == id_)
