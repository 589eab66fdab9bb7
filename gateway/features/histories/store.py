"""The store of responses and conversations (`conversations.py`), by owner, until they expire.

A response lives for `ttl_s` after its last use. Responses that continue each other form a tree, which expires as a whole. A new
turn renews the whole tree, but only if a tenth of the time has passed, so that few turns write all rows. Otherwise the new
response gets the tree's expiry. In a tree of more than MAX_RENEWED responses a new turn renews only those before it, else one
tree could take the time of all writers. A response never outlives those before it.

`purge` empties expired responses. Their ids are stored for another TOMBSTONE_S, so that a client learns the reason.

Reads never write: reading a response does not renew it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Integer, and_, bindparam, delete, func, insert, literal, select, update

from gateway.features.histories import names
from gateway.features.histories.conversations import ConversationStore
from gateway.features.histories.purging import TOMBSTONE_S, delete_emptied, delete_frames, delete_refs, emptied
from gateway.features.histories.records import (
    Charge,
    HistoryTooLargeError,
    Item,
    StoredResponse,
    TurnNames,
    TurnOutline,
    UnknownObjectError,
    free,
)
from gateway.features.histories.sizes import release
from gateway.features.histories.tables import ROW, frames, has_name, responses

MAX_TURNS: Final = 10_000  # in a replayed history
MAX_RENEWED: Final = 1000  # responses of a tree that are renewed as a whole, in a transaction of some 50 ms
_RENEWED_SHARE: Final = 0.1

T = TypeVar("T")

_COLUMNS: Final = ("owner", "id", "parent", "conversation", "created_at", "status", "input", "output", "response")
_NAMES: Final = tuple(field.name for field in fields(TurnNames))


class HistoryStore(ConversationStore):
    """Stores responses, in addition to conversations. max_renewed: a parameter for tests."""

    max_renewed = MAX_RENEWED

    # -- responses

    async def put(self, response: StoredResponse, added: Sequence[Item] = ()) -> bool:
        """Stores a response; it is durable when this returns. False: another response has its id, and stays.

        added: items for its conversation, in either case.

        Raises UnknownObjectError if its conversation does not exist, HistoryTooLargeError if that is full.
        """
        now = self._clock()
        at: int | None = None

        def work(connection: Connection) -> bool:
            nonlocal at
            kept = self._insert(connection, response, now) is not None
            if response.conversation:
                at = self._extend(connection, response.owner, response.conversation, added, now, at)
            return kept

        return await self._database.write(work)

    async def get(self, owner: str, id_: str) -> StoredResponse:
        """Raises UnknownObjectError or ExpiredObjectError."""

        def work(connection: Connection) -> Any:
            return connection.execute(_GET, {"owner": owner, "id": id_}).one_or_none()

        row = await self._database.read(work)
        self._require(row, id_)
        return _read(row, _COLUMNS)

    async def chain(self, owner: str, id_: str, max_bytes: int) -> list[StoredResponse]:
        """The response and all before it, the oldest first, without the `response` objects, and without answers that the next
        one does not go on from.

        Raises UnknownObjectError or ExpiredObjectError with the missing id, HistoryTooLargeError before the contents are read.
        """

        found = await self._lineage(owner, id_, max_bytes, _CHAIN, lambda row: _read(row, _READ))
        for at, later in enumerate(found[1:]):
            if later.log.after_input:
                found[at] = replace(found[at], output=b"")
        return found

    async def outline(self, owner: str, id_: str, max_bytes: int) -> list[TurnOutline]:
        """The same without contents: 32 bytes for each entry of a log. Raises the same errors."""

        def read(row: Any) -> TurnOutline:
            return TurnOutline(_names_in(row), row.input_size, row.output_size)

        return await self._lineage(owner, id_, max_bytes, _OUTLINE, read)

    async def _lineage(self, owner: str, id_: str, max_bytes: int, query: Any, read: Callable[[Any], T]) -> list[T]:
        """The rows of `chain`, read apart from the event loop where the database is."""

        def work(connection: Connection) -> tuple[Any, Sequence[Any], list[T]]:
            key = {"owner": owner, "id": id_}
            first = connection.execute(_HEAD, key).one_or_none()
            if first is None or first.emptied or first.size > max_bytes or first.turns > MAX_TURNS:
                return first, (), []
            rows = connection.execute(query, {**key, "turns": first.turns}).all()
            return first, rows, [read(row) for row in rows]

        first, rows, found = await self._database.read(work)
        self._require(first, id_)
        if first.size > max_bytes or first.turns > MAX_TURNS:
            raise HistoryTooLargeError(first.size, first.turns)
        for row in rows:
            self._require(row, row.id)
        if rows[0].parent or len(rows) != first.turns:
            raise UnknownObjectError(rows[0].parent or id_)
        return found

    async def items_by_id(
        self, owner: str, ids: Sequence[str], max_bytes: int, charge: Charge = free, pick: names.Pick = names.pick_in_process
    ) -> dict[str, bytes]:
        """Items (JSON) of responses and conversations by their ids, without unknown ones.

        charge: called with the size before the contents are read. pick: finds items in a response's content. Raises
        HistoryTooLargeError beyond max_bytes, and the errors of `charge` and `pick`.
        """

        now = self._clock()

        def sizes(connection: Connection) -> names.ItemLocations:
            return names.locate(connection, owner, ids, now, max_bytes)

        def content(connection: Connection) -> tuple[dict[str, bytes], names.Contents]:
            return names.read(connection, owner, places, now)

        places = await self._database.read(sizes)
        charge(places.size)  # in the event loop: the counter is not thread-safe
        own, contents = await self._database.read(content)
        grown = sum(map(len, own.values())) + sum(len(each[0]) + len(each[1]) for each in contents.values()) - places.size
        if grown > 0:  # another process has written in the meantime
            charge(grown)
        return own | await names.picked(places.response_ids, contents, pick)

    # -- time

    async def sweep(self) -> int:
        """Does some of the periodic work. Returns the number of changed objects; 0: nothing is left to do."""
        return await self.purge()

    async def purge(self) -> int:
        """Empty some expired objects, and delete some that were emptied long ago. Returns their number; 0: none are left."""
        now = self._clock()

        def work(connection: Connection) -> int:
            gone = delete_refs(connection, now) + delete_frames(connection, now)
            return emptied(connection, now) + gone + delete_emptied(connection, now - TOMBSTONE_S)

        return await self._database.write(work)

    def _insert(
        self, connection: Connection, response: StoredResponse, now: float, ttl_s: float = 0.0, *, renews: bool = False
    ) -> float | None:
        """Inserts a response; returns its expiry. None: another one has its id. A response with the same creation time replaces
        itself, because a transaction may be repeated. ttl_s: its lifetime; 0: the longest. renews: one with its id is the same.
        """
        ttl_s = min(ttl_s or self._ttl_s, self._ttl_s)
        row: dict[str, Any] = {name: getattr(response, name) for name in _COLUMNS}
        row |= {name: getattr(response.log, name) for name in _NAMES}
        row |= {"after_input": int(response.log.after_input), "digests": response.log.digests or None}
        row["request_id"] = response.request_id
        row |= {"root": response.id, "turns": 1, "size": len(response.input) + len(response.output) + 2, "emptied": 0}
        row["open"] = response.log.open or None
        row["expires_at"] = expires_at = now + ttl_s
        rows = connection.execute(_KNOWN, {"owner": response.owner, "id": response.id, "parent": response.parent})
        known = {each.id: each for each in rows.all()}
        same = known.get(response.id)
        if same and not same.emptied and same.created_at != response.created_at and (renews or same.expires_at > now):
            # Also a tree that has expired, and is not emptied yet, is renewed as a whole.
            return self._renewed(connection, response.owner, same, expires_at, ttl_s) if renews else None
        if response.parent == response.id:
            row["parent"] = ""  # reuses the id of an expired response
        elif parent := known.get(response.parent):
            before = parent.size - (parent.output_size if response.log.after_input else 0)
            row["root"], row["turns"], row["size"] = parent.root, parent.turns + 1, before + row["size"]
            row["expires_at"] = self._renewed(connection, response.owner, parent, expires_at, ttl_s)
        if same:
            release(connection, responses, _is(response.owner, response.id))
            connection.execute(delete(responses).where(_is(response.owner, response.id)))
            names.remove(connection, response.owner, response.id)
        connection.execute(_INSERT, row)
        size = len(response.input) + len(response.output) + len(response.response) + ROW
        self._sizes.add(connection, response.owner, size + len(response.log.digests) + len(response.log.open))
        names.add(connection, response.owner, response.id, response.names)
        expiry: float = row["expires_at"]
        return expiry

    def _renewed(self, connection: Connection, owner: str, known: Any, expires_at: float, ttl_s: float) -> float:
        """The expiry of a known response. If enough of its lifetime has passed, its tree is renewed up to this time, or those
        before it in a large tree.
        """
        if known.expires_at >= expires_at - ttl_s * _RENEWED_SHARE:
            current: float = known.expires_at
            return current
        tree = and_(responses.c.owner == owner, responses.c.root == known.root, responses.c.emptied == 0)
        these = and_(tree, responses.c.expires_at <= expires_at)
        if connection.execute(select(responses.c.id).where(tree).offset(self.max_renewed).limit(1)).first() is not None:
            these = and_(these, responses.c.id.in_(select(_line(owner, known.id, known.turns).c.id)))
        connection.execute(update(responses).where(these).values(expires_at=expires_at))
        used = select(responses.c.frame).where(these, has_name(responses.c.frame))
        shorter = and_(frames.c.owner == owner, frames.c.name.in_(used), frames.c.expires_at < expires_at)
        connection.execute(update(frames).where(shorter).values(expires_at=expires_at))
        return expires_at


_READ: Final = ("owner", "id", "parent", "conversation", "created_at", "status", "input", "output")


def _read(row: Any, columns: Sequence[str]) -> StoredResponse:
    """The response in a row with these columns, and with the columns of its names."""
    found = {**dict.fromkeys(_COLUMNS, b""), **{name: getattr(row, name) for name in columns}}
    return StoredResponse(**found, log=_names_in(row))


def _names_in(row: Any) -> TurnNames:
    log = {name: getattr(row, name) for name in _NAMES}
    log |= {"after_input": bool(row.after_input), "digests": row.digests or b"", "open": row.open or b""}
    return TurnNames(**log)


def _is(owner: str, id_: str) -> Any:
    return and_(responses.c.owner == owner, responses.c.id == id_)


def _line(owner: Any, id_: Any, turns: Any) -> Any:
    """The ids of a response and of all before it, each with its depth, from 1. turns: the expected number, a bound in case of a
    cycle of ids.
    """
    head = select(responses.c.id, responses.c.parent, literal(1).label("depth")).where(_is(owner, id_))
    line = head.cte("chain", recursive=True)
    before = select(responses.c.id, responses.c.parent, line.c.depth + 1).where(
        responses.c.owner == owner, responses.c.id == line.c.parent, line.c.parent != "", line.c.depth < turns
    )
    return line.union_all(before)


def _chain(columns: Sequence[Any]) -> Any:
    """Selects these columns of the rows from the oldest to this one. turns: as in `_line`."""
    chain = _line(bindparam("owner"), bindparam("id"), bindparam("turns", type_=Integer))
    every = [responses.c[name] for name in ("id", "parent", "expires_at", "emptied", *_NAMES)]
    query = select(*every, *columns).join(chain, chain.c.id == responses.c.id)
    return query.where(_MINE).order_by(chain.c.depth.desc())


# Frequent statements are built once, because SQLAlchemy takes longer to build one than SQLite to execute it.
_MINE: Final = responses.c.owner == bindparam("owner")
_THIS: Final = and_(_MINE, responses.c.id == bindparam("id"))
_GET: Final = select(responses.c.expires_at, responses.c.emptied, *(responses.c[name] for name in (*_COLUMNS, *_NAMES))).where(
    _THIS
)
_HEAD: Final = select(responses.c.turns, responses.c.size, responses.c.expires_at, responses.c.emptied).where(_THIS)
_CHAIN: Final = _chain([responses.c[name] for name in _READ if name not in ("id", "parent")])
_OUTLINE: Final = _chain([func.length(responses.c[name]).label(f"{name}_size") for name in ("input", "output")])
_KNOWN: Final = select(
    *(responses.c[name] for name in ("id", "root", "turns", "size", "created_at", "expires_at", "emptied")),
    func.length(responses.c.output).label("output_size"),
).where(_MINE, responses.c.id.in_([bindparam("id"), bindparam("parent")]))
_INSERT: Final = insert(responses)
