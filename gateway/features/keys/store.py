"""Keys and their spending in a database.

Revoked and expired keys remain for RETENTION_S, so that their holders get a specific error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Dialect, case, delete, func, insert, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.database.database import Database
from gateway.database.driver import SQLITE, insert_each
from gateway.features.keys.limits.account import Day, Total
from gateway.features.keys.limits.calendar import day_of_text, day_text
from gateway.features.keys.record import MAX_GRACE_S, Key, KeyRefusedError, KeySettings, changed, credited, no_key
from gateway.features.keys.ring import MAX_KEYS
from gateway.features.keys.secret import digest_of, new_id, new_key
from gateway.features.keys.tables import TABLES, actions, keys, revisions, spent, warned
from gateway.server.actions import OperatorAction

_ACTION: Final = ("at", "action", "by", "client", "agent", "status", "details")
OPERATION_S: Final = 5.0
KEYS_PER_READ: Final = 1000
SPENDING_ROWS_PER_READ: Final = 5000  # about 20 ms of the event loop
SpendingCursor = tuple[int, str, str, str]
"""A position among the spending rows, in the order of writing: revision, day, key, process."""
MAX_OLD_SECRETS: Final = 3  # old secrets of a key that stay valid after rotations
RETENTION_S: Final = 90 * 86_400.0


class KeyStore:
    """database: open. now: Unix seconds."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    async def create(self, settings: KeySettings) -> tuple[Key, str]:
        """Creates a key. Returns it and its secret. Raises StoreFailed, KeyRefusedError."""
        id_ = new_id()
        secret = new_key(id_)
        key = Key(id_, settings, ((digest_of(secret), 0.0),), created_at=self._now())
        return await self._database.write(lambda connection: _create(connection, key, self._now())), secret

    async def rotate(self, id_: str, grace_s: float) -> tuple[Key, str]:
        """Makes a new secret for a key. Old secrets stay valid for grace_s, or shorter if an earlier rotation said so.

        Raises StoreFailed, KeyNotFoundError, KeyRefusedError.
        """
        secret, until = new_key(id_), self._now() + min(max(grace_s, 0.0), MAX_GRACE_S)
        digest = digest_of(secret)

        def work(connection: Connection) -> Key:
            _next_revision(connection)
            key = _get(connection, id_)
            if key.revoked_at:
                raise KeyRefusedError(f"The key {id_} was revoked: make a new one.")
            if any(known == digest for known, _ in key.digests):
                return key  # a retried transaction had succeeded
            old_secrets = [(old, min(ends or until, until)) for old, ends in key.digests if not ends or ends > self._now()]
            kept = old_secrets[:MAX_OLD_SECRETS]
            return _save(connection, msgspec.structs.replace(key, digests=((digest, 0.0), *kept)))

        return await self._database.write(work), secret

    async def undo_rotation(self, id_: str, secret: str, before: Key) -> Key:
        """Undoes the last rotation, because its secret was not delivered. The old secrets become valid as before.

        before: the key before that rotation. Raises StoreFailed, KeyNotFoundError, KeyRefusedError.
        """
        digest, ends = digest_of(secret), dict(before.digests)

        def work(connection: Connection) -> Key:
            _next_revision(connection)
            key = _get(connection, id_)
            if key.digests[0][0] != digest:  # rotated again since, or already undone
                return key
            kept = [(each, ends.get(each, until)) for each, until in key.digests[1:]]
            if not kept:
                raise KeyRefusedError(f"The key {id_} has no old secret.")
            # The rotation had removed these, because of MAX_OLD_SECRETS.
            dropped = [each for each in before.digests if each[0] not in dict(kept)]
            return _save(connection, msgspec.structs.replace(key, digests=((kept[0][0], 0.0), *kept[1:], *dropped)))

        return await self._database.write(work)

    async def revoke(self, id_: str) -> Key:
        """Revokes a key. Idempotent. Raises StoreFailed, KeyNotFoundError."""

        def work(connection: Connection) -> Key:
            _next_revision(connection)
            key = _get(connection, id_)
            return key if key.revoked_at else _save(connection, msgspec.structs.replace(key, revoked_at=self._now()))

        return await self._database.write(work)

    async def credit(self, id_: str, day: str, usd: float) -> Key:
        """Raises the budget of a key for a day (YYYY-MM-DD). Raises StoreFailed, KeyNotFoundError, KeyRefusedError."""
        made: Key | None = None

        def work(connection: Connection) -> Key:
            nonlocal made
            _next_revision(connection)
            key = _get(connection, id_)
            if made is not None and key.credits == made.credits:
                return key  # a retried transaction had succeeded
            made = credited(key, day, usd)
            return _save(connection, made)

        return await self._database.write(work)

    async def update(self, id_: str, changes: Mapping[str, Any]) -> Key:
        """Changes the settings of a key: see `record.changed`. Raises StoreFailed, KeyNotFoundError, KeyRefusedError,
        ConfigError.
        """

        def work(connection: Connection) -> Key:
            _next_revision(connection)
            return _save(connection, changed(_get(connection, id_), changes))

        return await self._database.write(work)

    async def find(self, id_: str) -> Key:
        """Raises StoreFailed, KeyNotFoundError."""
        return await self._database.read(lambda connection: _get(connection, id_))

    async def list_page(self, after: str, limit: int) -> tuple[list[Key], bool]:
        """At most `limit` keys in the order of their ids, after the id `after`. The flag says whether more follow. Raises
        StoreFailed.
        """
        query = select(keys).where(keys.c.id > after[:100]).order_by(keys.c.id).limit(limit + 1)
        found = await self._database.read(lambda connection: [_key(row) for row in connection.execute(query)])
        return found[:limit], len(found) > limit

    async def changed_keys(self, since: int) -> list[Key]:
        """At most KEYS_PER_READ keys with a later revision, in the order of revisions. Raises StoreFailed."""
        query = select(keys).where(keys.c.revision > since).order_by(keys.c.revision).limit(KEYS_PER_READ)
        return await self._database.read(lambda connection: [_key(row) for row in connection.execute(query)])

    async def ids(self) -> set[str]:
        """Raises StoreFailed."""
        return await self._database.read(lambda connection: set(connection.execute(select(keys.c.id)).scalars()))

    # -- spending

    async def write_spending(self, process: str, totals: Sequence[Total]) -> None:
        """Stores the totals of a process. Raises StoreFailed."""
        rows = [
            (day_text(day), id_, process, requests, tokens, pico)
            for id_, requests, tokens, _, days in totals
            for day, pico in days
        ]
        if rows:
            await self._database.write(lambda connection: _upsert_spending(connection, rows))

    async def spending_since(
        self, own_process: str, first: Day, after: SpendingCursor
    ) -> tuple[dict[str, list[Total]], SpendingCursor, bool]:
        """At most SPENDING_ROWS_PER_READ rows after the cursor, from the day `first` on, as totals by process. The rows of
        own_process are left out. Returns the totals, the cursor of the last row, and whether more rows may follow. Raises
        StoreFailed.
        """
        order = (spent.c.revision, spent.c.day, spent.c.key, spent.c.process)
        query = select(spent).where(tuple_(*order) > tuple_(*after)).where(spent.c.day >= day_text(first))
        query = query.where(spent.c.process != own_process).order_by(*order).limit(SPENDING_ROWS_PER_READ)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        if rows:
            last = rows[-1]
            after = (last.revision, last.day, last.key, last.process)
        return _by_process(rows), after, len(rows) == SPENDING_ROWS_PER_READ

    async def spending_of(self, ids: Sequence[str], days: Sequence[Day]) -> dict[str, list[Total]]:
        """The totals of these keys on these days, by process. Pass few keys: the query does one look-up per key and day. Raises
        StoreFailed.
        """
        query = select(spent).where(spent.c.day.in_([day_text(day) for day in days])).where(spent.c.key.in_(ids))
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return _by_process(rows)

    async def spent_by_key(self, today: Day) -> dict[str, tuple[int, int]]:
        """The spending of each key today, and this month: picodollars of all processes. O(rows of the month). Raises
        StoreFailed.
        """
        month, text = today // 31 * 31, day_text(today)
        columns = spent.c.key, spent.c.day, spent.c.pico
        query = select(*columns).where(spent.c.day.between(day_text(month), day_text(month + 30)))

        def work(connection: Connection) -> dict[str, tuple[int, int]]:
            sums = dict[str, tuple[int, int]]()
            for key, day, pico in connection.execute(query):
                of_day, of_month = sums.get(key, (0, 0))
                sums[key] = of_day + (pico if day == text else 0), of_month + pico
            return sums

        return await self._database.read(work)

    async def claim_warning(self, id_: str, period: str, process: str) -> bool:
        """True if this process is the first one to warn of the budget of a key in this period. Raises StoreFailed."""

        def work(connection: Connection) -> bool:
            _next_revision(connection)
            row = warned.c.key == id_, warned.c.period == period
            if (by := connection.execute(select(warned.c.process).where(*row)).scalar()) is not None:
                return bool(by == process)  # by this process: a retried transaction had succeeded
            connection.execute(insert(warned).values(key=id_, period=period, process=process))
            return True

        return await self._database.write(work)

    # -- actions of operators

    async def keep_actions(self, kept: Sequence[tuple[str, OperatorAction]]) -> None:
        """kept: actions with their ids. Raises StoreFailed."""
        rows = [{"id": id_, **{name: getattr(action, name) for name in _ACTION}} for id_, action in kept]

        def work(connection: Connection) -> None:
            query = select(actions.c.id).where(actions.c.id.in_([id_ for id_, _ in kept]))
            known = set(connection.execute(query).scalars())  # not empty if a retried transaction had succeeded
            if missing := [row for row in rows if row["id"] not in known]:
                connection.execute(insert(actions), missing)

        await self._database.write(work)

    async def latest_actions(self, limit: int, before: float = math.inf) -> list[OperatorAction]:
        """The latest actions before this time (Unix seconds), the latest first. Raises StoreFailed."""
        query = select(actions).order_by(actions.c.at.desc(), actions.c.id).limit(limit)
        if before != math.inf:
            query = query.where(actions.c.at < before)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [OperatorAction(**{name: getattr(row, name) for name in _ACTION}) for row in rows]

    async def revision(self) -> int:
        """The latest revision. If it is smaller than an earlier one, the database was replaced or restored from a backup.
        Raises StoreFailed.
        """
        return await self._database.read(_revision)

    async def purge_spending(self, before: Day) -> None:
        """Deletes the spending of earlier days, the warnings of earlier days and months, and actions older than RETENTION_S.
        Raises StoreFailed.
        """
        statements = [
            delete(spent).where(spent.c.day < day_text(before)),
            delete(warned).where(warned.c.period < day_text(before)),
            delete(actions).where(actions.c.at < self._now() - RETENTION_S),
        ]

        def work(connection: Connection) -> None:
            for statement in statements:
                connection.execute(statement)

        await self._database.write(work)

    async def close(self) -> None:
        await self._database.close()


async def open_key_store(url: str, now: Callable[[], float], *, read_only: bool = False) -> KeyStore:
    """Opens the database and creates missing tables, except with read_only. url: with a path. Raises StoreFailed."""
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
                f"There are {MAX_KEYS:,} keys, which is the maximum. Keys are removed 90 days after they are revoked or expire."
            )
    # The row exists if this is the retry of a transaction that had succeeded.
    if connection.execute(select(keys.c.id).where(keys.c.id == key.id)).first() is None:
        connection.execute(insert(keys).values(id=key.id, revision=0, digests="", body=""))
    return _save(connection, key)


def _purge(connection: Connection, now: float) -> None:
    """Deletes keys that were revoked or expired RETENTION_S ago. O(keys)."""
    old = now - RETENTION_S
    for key in map(_key, connection.execute(select(keys)).all()):
        if 0 < key.revoked_at < old or 0 < key.expires_at < old:
            connection.execute(delete(keys).where(keys.c.id == key.id))


def _next_revision(connection: Connection) -> None:
    """Increments the revision. It comes first in each transaction, so that its row lock serializes changes of keys."""
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


def _get(connection: Connection, id_: str) -> Key:
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


def _upsert_spending(connection: Connection, rows: Sequence[tuple[str, str, str, int, int, int]]) -> None:
    """rows: day, key, process, requests, tokens, picodollars."""
    _next_revision(connection)
    revision = _revision(connection)
    insert_each(connection, _upsert_statement(connection.dialect), [(*row[:3], revision, *row[3:]) for row in rows])


@lru_cache(8)
def _upsert_statement(dialect: Dialect) -> str:
    """The upsert statement; parameters in the order of the columns. The total of a day never falls, even if a process has
    forgotten part of it.
    """
    statement: Any = (sqlite if dialect.name == SQLITE else postgresql).insert(spent)
    totals: dict[str, Any] = {name: statement.excluded[name] for name in ("revision", "requests", "tokens")}
    totals["pico"] = case((statement.excluded.pico > spent.c.pico, statement.excluded.pico), else_=spent.c.pico)
    updated = statement.on_conflict_do_update(index_elements=["day", "key", "process"], set_=totals)
    return str(updated.compile(dialect=dialect))
