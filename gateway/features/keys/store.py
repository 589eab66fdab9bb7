"""Keys in a database: made, listed, rotated, revoked; and what they have spent, as each process writes it.

Keys that are revoked or expired stay, so that their holders read why, until they have been so for PURGED_S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Dialect, case, delete, func, insert, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.database.database import Database
from gateway.database.driver import SQLITE, insert_each
from gateway.features.keys.limits.account import Day, Total
from gateway.features.keys.limits.calendar import day_of_text, day_text
from gateway.features.keys.record import MAX_GRACE_S, Key, KeyRefusedError, Settings, no_key
from gateway.features.keys.ring import MAX_KEYS
from gateway.features.keys.secret import digest_of, new_id, new_key
from gateway.features.keys.tables import TABLES, keys, revisions, spent

OPERATION_S: Final = 5.0
READ_AT_ONCE: Final = 1000  # keys
SPENT_AT_ONCE: Final = 5000  # rows of what was spent: some 20 ms of the event loop
Place = tuple[int, str, str, str]
"""Of a row of what was spent, in the order in which they are written: revision, day, key, process."""
MAX_FORMER: Final = 3  # secrets of a key that were rotated, and go on
PURGED_S: Final = 90 * 86_400.0


class KeyStore:
    """See the top of this file. now: Unix seconds."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        """database: open."""
        self._database = database
        self._now = now

    async def create(self, settings: Settings) -> tuple[Key, str]:
        """A new key, and its secret. Raises StoreFailed, KeyRefusedError."""
        id_ = new_id()
        secret = new_key(id_)
        key = Key(id_, settings, ((digest_of(secret), 0.0),), created_at=self._now())
        return await self._database.write(lambda connection: _create(connection, key, self._now())), secret

    async def rotate(self, id_: str, grace_s: float) -> tuple[Key, str]:
        """Another secret for a key; former ones are valid for grace_s, or for what is left of an earlier grace.

        Raises StoreFailed, KeyNotFoundError, KeyRefusedError.
        """
        secret, until = new_key(id_), self._now() + min(max(grace_s, 0.0), MAX_GRACE_S)
        digest = digest_of(secret)

        def work(connection: Connection) -> Key:
            _next_revision(connection)
            key = _one(connection, id_)
            if key.revoked_at:
                raise KeyRefusedError(f"The key {id_} was revoked: make a new one.")
            if any(known == digest for known, _ in key.digests):
                return key  # this work was done already
            former = [(old, min(ends or until, until)) for old, ends in key.digests if not ends or ends > self._now()]
            kept = former[:MAX_FORMER]
            return _save(connection, msgspec.structs.replace(key, digests=((digest, 0.0), *kept)))

        return await self._database.write(work), secret

    async def take_back(self, id_: str, secret: str, before: Key) -> Key:
        """Undo the last rotation, whose secret nobody has got: former ones go on as they did before it.

        Raises StoreFailed, KeyNotFoundError, KeyRefusedError.
        """
        digest, ends = digest_of(secret), dict(before.digests)

        def work(connection: Connection) -> Key:
            _next_revision(connection)
            key = _one(connection, id_)
            if key.digests[0][0] != digest:  # rotated again meanwhile, or taken back already
                return key
            kept = [(each, ends.get(each, until)) for each, until in key.digests[1:]]
            if not kept:
                raise KeyRefusedError(f"The key {id_} has no former secret.")
            dropped = [each for each in before.digests if each[0] not in dict(kept)]  # there was no room for more
            return _save(connection, msgspec.structs.replace(key, digests=((kept[0][0], 0.0), *kept[1:], *dropped)))

        return await self._database.write(work)

    async def revoke(self, id_: str) -> Key:
        """From now on it is of no use. Idempotent. Raises StoreFailed, KeyNotFoundError."""

        def work(connection: Connection) -> Key:
            _next_revision(connection)
            key = _one(connection, id_)
            return key if key.revoked_at else _save(connection, msgspec.structs.replace(key, revoked_at=self._now()))

        return await self._database.write(work)

    async def find(self, id_: str) -> Key:
        """Raises StoreFailed, KeyNotFoundError."""
        return await self._database.read(lambda connection: _one(connection, id_))

    async def listed(self, after: str, most: int) -> tuple[list[Key], bool]:
        """By id, those behind one; and whether there are more. Raises StoreFailed."""
        query = select(keys).where(keys.c.id > after[:100]).order_by(keys.c.id).limit(most + 1)
        found = await self._database.read(lambda connection: [_key(row) for row in connection.execute(query)])
        return found[:most], len(found) > most

    async def changed(self, since: int) -> list[Key]:
        """Those with a later revision, READ_AT_ONCE at most, in order. Raises StoreFailed."""
        query = select(keys).where(keys.c.revision > since).order_by(keys.c.revision).limit(READ_AT_ONCE)
        return await self._database.read(lambda connection: [_key(row) for row in connection.execute(query)])

    async def ids(self) -> set[str]:
        """Raises StoreFailed."""
        return await self._database.read(lambda connection: set(connection.execute(select(keys.c.id)).scalars()))

    # -- what was spent

    async def write_spent(self, process: str, totals: Sequence[Total]) -> None:
        """Raises StoreFailed."""
        rows = [
            (day_text(day), id_, process, requests, tokens, pico)
            for id_, requests, tokens, _, days in totals
            for day, pico in days
        ]
        if rows:
            await self._database.write(lambda connection: _put_spent(connection, rows))

    async def changed_spent(self, but: str, first: Day, after: Place) -> tuple[dict[str, list[Total]], Place, bool]:
        """By process, of all but one, from that day on, what was written behind that place; SPENT_AT_ONCE rows at most. With
        the place of the last one, and whether there may be more. Raises StoreFailed.
        """
        place = (spent.c.revision, spent.c.day, spent.c.key, spent.c.process)
        query = select(spent).where(tuple_(*place) > tuple_(*after)).where(spent.c.day >= day_text(first))
        query = query.where(spent.c.process != but).order_by(*place).limit(SPENT_AT_ONCE)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        if rows:
            last = rows[-1]
            after = (last.revision, last.day, last.key, last.process)
        return _by_process(rows), after, len(rows) == SPENT_AT_ONCE

    async def spent_of(self, ids: Sequence[str], days: Sequence[Day]) -> dict[str, list[Total]]:
        """By process, what these keys have spent on these days. Few of both at once: a look-up for each pair. Raises
        StoreFailed.
        """
        query = select(spent).where(spent.c.day.in_([day_text(day) for day in days])).where(spent.c.key.in_(ids))
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return _by_process(rows)

    async def revision(self) -> int:
        """The latest. Less than one that was read before: the database is another one, or from a backup. Raises StoreFailed."""
        return await self._database.read(_revision)

    async def purge_spent(self, before: Day) -> None:
        """Raises StoreFailed."""
        statement = delete(spent).where(spent.c.day < day_text(before))
        await self._database.write(lambda connection: connection.execute(statement) and None)

    async def close(self) -> None:
        await self._database.close()


async def opened(url: str, now: Callable[[], float], *, read_only: bool = False) -> KeyStore:
    """url: with a path. Makes the tables, unless it is only read. Raises StoreFailed."""
    database = Database(url, TABLES, OPERATION_S, read_only=read_only)
    await database.open()
    return KeyStore(database, now)


def _create(connection: Connection, key: Key, now: float) -> Key:
    _next_revision(connection)
    count = connection.execute(select(func.count()).select_from(keys)).scalar_one()
    if count >= MAX_KEYS:
        _purge(connection, now)
        if connection.execute(select(func.count()).select_from(keys)).scalar_one() >= MAX_KEYS:
            raise KeyRefusedError(
                f"There are {MAX_KEYS:,} keys, and no more are possible; those revoked for 90 days are removed."
            )
    if connection.execute(select(keys.c.id).where(keys.c.id == key.id)).first() is None:  # else this work was done already
        connection.execute(insert(keys).values(id=key.id, revision=0, digests="", body=""))
    return _save(connection, key)


def _purge(connection: Connection, now: float) -> None:
    """O(keys)."""
    old = now - PURGED_S
    for key in map(_key, connection.execute(select(keys)).all()):
        if 0 < key.revoked_at < old or 0 < key.expires_at < old:
            connection.execute(delete(keys).where(keys.c.id == key.id))


def _next_revision(connection: Connection) -> None:
    """First of all in a transaction: others that change keys wait here."""
    changed: Any = connection.execute(update(revisions).values(revision=revisions.c.revision + 1))
    if not changed.rowcount:
        connection.execute(insert(revisions).values(id=1, revision=1))


def _revision(connection: Connection) -> int:
    return int(connection.execute(select(revisions.c.revision)).scalar_one_or_none() or 0)


def _save(connection: Connection, key: Key) -> Key:
    revision = _revision(connection)
    digests = " ".join(f"{digest.hex()}:{until!r}" for digest, until in key.digests)
    body = msgspec.json.encode(msgspec.structs.replace(key, digests=(), revision=0)).decode()
    values = {"revision": revision, "digests": digests, "body": body}
    connection.execute(update(keys).where(keys.c.id == key.id).values(values))
    return msgspec.structs.replace(key, revision=revision)


def _one(connection: Connection, id_: str) -> Key:
    """Raises KeyNotFoundError."""
    row = connection.execute(select(keys).where(keys.c.id == id_)).first()
    if row is None:
        raise no_key(id_)
    return _key(row)


def _key(row: Any) -> Key:
    key = msgspec.json.decode(row.body, type=Key)
    pairs = [each.partition(":") for each in row.digests.split()]
    digests = tuple([(bytes.fromhex(digest), float(until)) for digest, _, until in pairs])
    return msgspec.structs.replace(key, digests=digests, revision=row.revision)


def _by_process(rows: Iterable[Any]) -> dict[str, list[Total]]:
    found = dict[str, list[Total]]()
    for row in rows:
        total = (row.key, row.requests, row.tokens, 0, ((day_of_text(row.day), row.pico),))
        found.setdefault(row.process, []).append(total)
    return found


def _put_spent(connection: Connection, rows: Sequence[tuple[str, str, str, int, int, int]]) -> None:
    """rows: day, key, process, requests, tokens, picodollars."""
    _next_revision(connection)
    revision = _revision(connection)
    insert_each(connection, _add_spent(connection.dialect), [(*row[:3], revision, *row[3:]) for row in rows])


@lru_cache(8)
def _add_spent(dialect: Dialect) -> str:
    """Its parameters are in the order of the columns. A sum of a day never falls, whatever the process has forgotten."""
    statement: Any = (sqlite if dialect.name == SQLITE else postgresql).insert(spent)
    totals: dict[str, Any] = {name: statement.excluded[name] for name in ("revision", "requests", "tokens")}
    totals["pico"] = case((statement.excluded.pico > spent.c.pico, statement.excluded.pico), else_=spent.c.pico)
    updated = statement.on_conflict_do_update(index_elements=["day", "key", "process"], set_=totals)
    return str(updated.compile(dialect=dialect))
