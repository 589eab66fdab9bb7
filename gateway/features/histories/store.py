"""The store: responses, each its owner's alone, until they expire, and conversations (`conversations.py`).

A response lives for `ttl_s` after its last use. The responses that go on with each other are a tree, and all of it expires
at the same moment: going on with one renews them all, once a tenth of the time has passed, so that few turns write all rows;
until then a new one has the time that the others have.
What has expired is emptied by `purge`; its id is known for TOMBSTONE_S more, so that a client reads why it is gone.

Reads never write: fetching an answer does not renew it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Integer, and_, bindparam, delete, insert, literal, select, update

from gateway.features.histories import names
from gateway.features.histories.conversations import Conversations
from gateway.features.histories.purging import TOMBSTONE_S, emptied, forgotten
from gateway.features.histories.records import Charge, Item, StoredResponse, TooLarge, Unknown, free
from gateway.features.histories.tables import responses

MAX_TURNS: Final = 10_000  # of a history that is replayed
_RENEWED_SHARE: Final = 0.1

_COLUMNS: Final = ("owner", "id", "parent", "conversation", "created_at", "status", "input", "output", "response")


class Store(Conversations):
    """See the top of this file, and Conversations."""

    # -- responses

    async def put(self, response: StoredResponse, added: Sequence[Item] = ()) -> bool:
        """Returns when it is durable. False: it is not kept, for its id is that of another one, which stays.

        added: to its conversation, either way. Raises Unknown if its conversation is gone, TooLarge if that is full.
        """
        now = self._clock()
        at: int | None = None

        def work(connection: Connection) -> bool:
            nonlocal at
            kept = self._insert(connection, response, now)
            if response.conversation:
                at = self._extend(connection, response.owner, response.conversation, added, now, at)
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
        self, owner: str, ids: Sequence[str], most: int, charge: Charge = free, pick: names.Pick = names.at_once
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

    # -- time

    async def purge(self) -> int:
        """Empty some of what has expired, and forget some of what was emptied long ago. Returns how many; 0: no more."""
        now = self._clock()

        def work(connection: Connection) -> int:
            return sum([emptied(connection, now), forgotten(connection, now - TOMBSTONE_S)])

        return await self._database.write(work)

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


_READ: Final = ("owner", "id", "parent", "conversation", "created_at", "status", "input", "output")


def _is(owner: str, id_: str) -> Any:
    return and_(responses.c.owner == owner, responses.c.id == id_)


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
