"""The store: responses and conversations, each its owner's alone, until they expire.

A response lives for `ttl_s` after its last use. The responses that go on with each other are a tree, and all of it expires
at the same moment: going on with one renews them all, once a tenth of the time has passed, so that few turns write all rows;
until then a new one has the time that the others have.
What has expired is emptied by `purge`; its id is known for TOMBSTONE_S more, so that a client reads why it is gone.

Reads never write: fetching an answer does not renew it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Integer, and_, bindparam, delete, func, insert, literal, select, update

from gateway.state import names
from gateway.state.database import Database
from gateway.state.purging import TOMBSTONE_S, emptied, forgotten
from gateway.state.records import Conversation, Expired, Item, StoredResponse, TooLarge, Unknown
from gateway.state.tables import conversations, items, responses

MAX_TURNS: Final = 10_000  # of a history that is replayed
MAX_ITEMS: Final = 100_000  # of a conversation
_RENEWED_SHARE: Final = 0.1

_COLUMNS: Final = ("owner", "id", "parent", "conversation", "created_at", "status", "input", "output", "response")


class Store:
    """See the top of this file. ttl_s: seconds. clock: Unix seconds. All methods raise StoreFailed."""

    def __init__(self, database: Database, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._ttl_s = ttl_s
        self._clock = clock

    async def close(self) -> None:
        await self._database.close()

    # -- responses

    async def put(self, response: StoredResponse, added: Sequence[Item] = ()) -> bool:
        """Returns when it is durable. False: it is not kept, for its id is that of another one, which stays.

        added: to its conversation, either way. Raises Unknown if its conversation is gone, TooLarge if that is full.
        """
        now = self._clock()

        def work(connection: Connection) -> bool:
            kept = self._insert(connection, response, now)
            if response.conversation:
                self._extend(connection, response.owner, response.conversation, added, now)
            return kept

        return await self._database.write(work)

    async def get(self, owner: str, id_: str) -> StoredResponse:
        """Raises Unknown or Expired."""

        def work(connection: Connection) -> Any:
            return connection.execute(_GET, {"owner": owner, "id": id_}).one_or_none()

        row = await self._database.read(work)
        self._require(row, id_)
        return StoredResponse(**{name: getattr(row, name) for name in _COLUMNS})

    async def chain(self, owner: str, id_: str, most: int) -> list[StoredResponse]:
        """The response and all before it, the oldest first, without the `response` objects. most: bytes.

        Raises Unknown or Expired with the id of the one that is missing, TooLarge before anything large is read.
        """

        def work(connection: Connection) -> tuple[Any, Sequence[Any]]:
            key = {"owner": owner, "id": id_}
            first = connection.execute(_HEAD, key).one_or_none()
            if first is None or first.emptied or first.size > most or first.turns > MAX_TURNS:
                return first, ()
            return first, connection.execute(_CHAIN, {**key, "turns": first.turns}).all()

        first, rows = await self._database.read(work)
        self._require(first, id_)
        if first.size > most or first.turns > MAX_TURNS:
            raise TooLarge(first.size, first.turns)
        for row in rows:
            self._require(row, row.id)
        if rows[0].parent or len(rows) != first.turns:
            raise Unknown(rows[0].parent or id_)
        return [
            StoredResponse(**{**dict.fromkeys(_COLUMNS, b""), **{name: getattr(row, name) for name in _READ}}) for row in rows
        ]

    async def named(
        self, owner: str, ids: Sequence[str], most: int, charge: names.Charge = names.free, pick: names.Pick = names.at_once
    ) -> dict[str, bytes]:
        """Items (JSON) of responses and conversations by their ids; those that are not there are left out.

        most: bytes that may be read. charge: called with the bytes before they are read. pick: finds items in what was read.
        Raises TooLarge, and what these raise.
        """

        now = self._clock()

        def sizes(connection: Connection) -> names.Places:
            return names.found(connection, owner, ids, now, most)

        def content(connection: Connection) -> tuple[dict[str, bytes], names.Contents]:
            return names.read(connection, owner, places, now)

        places = await self._database.read(sizes)
        charge(places.size)  # in the event loop: what counts bytes is not made for threads
        own, contents = await self._database.read(content)
        grown = sum(map(len, own.values())) + sum(len(each[0]) + len(each[1]) for each in contents.values()) - places.size
        if grown > 0:  # meanwhile
            charge(grown)
        return own | await names.picked(places.sought, contents, pick)

    # -- conversations

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
        now = self._clock()

        def work(connection: Connection) -> None:
            self._extend(connection, owner, id_, added, now)

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

    # -- time

    async def purge(self) -> int:
        """Empty some of what has expired, and forget some of what was emptied long ago. Returns how many; 0: no more."""
        now = self._clock()

        def work(connection: Connection) -> int:
            return sum([emptied(connection, now), forgotten(connection, now - TOMBSTONE_S)])

        return await self._database.write(work)

    def _require(self, row: Any, id_: str) -> None:
        """Raises Unknown or Expired. row: with expires_at and emptied."""
        if row is None:
            raise Unknown(id_)
        if row.emptied or row.expires_at <= self._clock():
            raise Expired(id_, self._ttl_s)

    def _insert(self, connection: Connection, response: StoredResponse, now: float) -> bool:
        """False: its id is taken. The same response again, by the time at which it was made, replaces itself: writes may be
        done twice.
        """
        row: dict[str, Any] = {name: getattr(response, name) for name in _COLUMNS}
        row |= {"root": response.id, "turns": 1, "size": len(response.input) + len(response.output) + 2, "emptied": 0}
        row["expires_at"] = expires_at = now + self._ttl_s
        rows = connection.execute(_KNOWN, {"owner": response.owner, "id": response.id, "parent": response.parent})
        known = {each.id: each for each in rows.all()}
        same = known.get(response.id)
        if same and not same.emptied and same.expires_at > now and same.created_at != response.created_at:
            return False
        if response.parent == response.id:
            row["parent"] = ""  # the same id again, after the one before has expired
        elif parent := known.get(response.parent):
            row["root"], row["turns"], row["size"] = parent.root, parent.turns + 1, parent.size + row["size"]
            if parent.expires_at >= expires_at - self._ttl_s * _RENEWED_SHARE:
                row["expires_at"] = parent.expires_at
            else:
                tree = and_(responses.c.owner == response.owner, responses.c.root == parent.root, responses.c.emptied == 0)
                connection.execute(update(responses).where(tree).values(expires_at=expires_at))
        if same:
            connection.execute(delete(responses).where(_is(response.owner, response.id)))
            names.remove(connection, response.owner, response.id)
        connection.execute(_INSERT, row)
        names.add(connection, response.owner, response.id, response.names)
        return True

    def _lock(self, connection: Connection, owner: str, id_: str) -> None:
        """For this transaction. Raises Unknown or Expired."""
        query = select(conversations.c.expires_at, conversations.c.emptied).where(_of(owner, id_)).with_for_update()
        self._require(connection.execute(query).one_or_none(), id_)

    def _extend(self, connection: Connection, owner: str, id_: str, added: Sequence[Item], now: float) -> None:
        self._lock(connection, owner, id_)
        connection.execute(update(conversations).where(_of(owner, id_)).values(expires_at=now + self._ttl_s))
        if not added:
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


_READ: Final = ("owner", "id", "parent", "conversation", "created_at", "status", "input", "output")


def _is(owner: str, id_: str) -> Any:
    return and_(responses.c.owner == owner, responses.c.id == id_)


def _of(owner: str, id_: str) -> Any:
    return and_(conversations.c.owner == owner, conversations.c.id == id_)


def _item(owner: str, conversation: str, id_: str) -> Any:
    return and_(items.c.owner == owner, items.c.conversation == conversation, items.c.id == id_)


def _chain() -> Any:
    """The rows from the oldest to this one. turns: how many there should be, which bounds it where ids make a circle."""
    head = select(responses.c.id, responses.c.parent, literal(1).label("depth")).where(_THIS)
    chain = head.cte("chain", recursive=True)
    before = select(responses.c.id, responses.c.parent, chain.c.depth + 1).where(
        _MINE, responses.c.id == chain.c.parent, chain.c.parent != "", chain.c.depth < bindparam("turns", type_=Integer)
    )
    chain = chain.union_all(before)
    columns = [responses.c[name] for name in _READ]
    query = select(responses.c.expires_at, responses.c.emptied, *columns).join(chain, chain.c.id == responses.c.id)
    return query.where(_MINE).order_by(chain.c.depth.desc())


# Statements of every request are made once: SQLAlchemy needs longer to make one than SQLite to carry it out.
_MINE: Final = responses.c.owner == bindparam("owner")
_THIS: Final = and_(_MINE, responses.c.id == bindparam("id"))
_GET: Final = select(responses.c.expires_at, responses.c.emptied, *(responses.c[name] for name in _COLUMNS)).where(_THIS)
_HEAD: Final = select(responses.c.turns, responses.c.size, responses.c.expires_at, responses.c.emptied).where(_THIS)
_CHAIN: Final = _chain()
_KNOWN: Final = select(
    *(responses.c[name] for name in ("id", "root", "turns", "size", "created_at", "expires_at", "emptied"))
).where(_MINE, responses.c.id.in_([bindparam("id"), bindparam("parent")]))
_INSERT: Final = insert(responses)
