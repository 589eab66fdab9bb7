"""Refs of prompt logs: names of heads, moved by compare-and-set.

A ref is a row of the conversations, `ref:NAME`, that has a head. It lives for `ttl_s` after its last move, and then is deleted
without a tombstone, which would keep its head.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, select, update

from gateway.features.histories.records import (
    RefMove,
    RefMovedError,
    StoredRef,
    TooManyRefsError,
    UnknownObjectError,
)
from gateway.features.histories.sizes import release
from gateway.features.histories.store import HistoryStore
from gateway.features.histories.tables import ROW, conversations, has_name, responses, unexpired

MAX_REFS: Final = 1000  # of an owner
_PREFIX: Final = "ref:"


class RefStore(HistoryStore):
    """Stores refs, in addition to responses."""

    async def ref(self, owner: str, name: str) -> StoredRef:
        """Raises UnknownObjectError."""

        def work(connection: Connection) -> Any:
            return connection.execute(_REF, _key(owner, name)).one_or_none()

        row = await self._database.read(work)
        if row is None or row.expires_at <= self._clock():
            raise UnknownObjectError(name)
        return StoredRef(name, row.head, row.expires_at)

    async def set_ref(self, owner: str, name: str, head: str, expected: str) -> StoredRef:
        """Moves a ref to the head of a stored turn, or makes it. expected: its present head; "": it does not exist. A ref that
        is there already stays. Raises RefMovedError, TooManyRefsError, or UnknownObjectError if no turn has the head.
        """
        now = self._clock()

        def work(connection: Connection) -> None:
            if connection.execute(_KEPT, {"owner": owner, "head": head, "now": now}).first() is None:
                raise UnknownObjectError("")
            self._move(connection, owner, name, head, [expected], now)

        await self._database.write(work)
        return StoredRef(name, head, now + self._ttl_s)

    async def delete_ref(self, owner: str, name: str, expected: str = "") -> None:
        """Deletes a ref. expected: its present head; "": any. Raises UnknownObjectError or RefMovedError."""
        now = self._clock()

        def work(connection: Connection) -> None:
            row = connection.execute(_LOCKED, _key(owner, name)).one_or_none()
            if row is None or row.expires_at <= now:
                raise UnknownObjectError(name)
            if expected not in ("", row.head):
                raise RefMovedError(row.head)
            release(connection, conversations, _is_ref(owner, name))
            connection.execute(delete(conversations).where(_is_ref(owner, name)))

        await self._database.write(work)

    async def move_ref(self, owner: str, move: RefMove, head: str) -> None:
        """Moves a ref as with a turn, to the head of a turn that was stored before."""
        now = self._clock()

        def work(connection: Connection) -> None:
            move.moved = self._moved_with_turn(connection, owner, move, head, now)

        await self._database.write(work)

    def _moved_with_turn(self, connection: Connection, owner: str, move: RefMove, head: str, now: float) -> bool:
        """Moves a ref with a turn that has this head. False: it stays where it is."""
        try:
            self._move(connection, owner, move.name, head, ["", *move.bases], now)
        except (RefMovedError, TooManyRefsError):
            return False
        return True

    def _move(self, connection: Connection, owner: str, name: str, head: str, from_: Collection[str], now: float) -> None:
        """Moves a ref that has one of these heads, or the new one already; "": it does not exist. Raises RefMovedError or
        TooManyRefsError.
        """
        row = connection.execute(_LOCKED, _key(owner, name)).one_or_none()
        present = row.head if row is not None and row.expires_at > now else ""
        if present != head and present not in from_:
            raise RefMovedError(present)
        values = {"head": head, "expires_at": now + self._ttl_s}
        if row is not None:
            connection.execute(update(conversations).where(_is_ref(owner, name)).values(**values))
            return
        if connection.execute(_COUNT, {"owner": owner}).scalar_one() >= MAX_REFS:
            raise TooManyRefsError(MAX_REFS)
        made = {**_key(owner, name), **values, "created_at": now, "emptied": 0, "metadata": b""}
        connection.execute(insert(conversations).values(made))
        self._sizes.add(connection, owner, ROW)


def _key(owner: str, name: str) -> dict[str, str]:
    return {"owner": owner, "id": f"{_PREFIX}{name}"}


def _is_ref(owner: str, name: str) -> Any:
    return and_(conversations.c.owner == owner, conversations.c.id == f"{_PREFIX}{name}", has_name(conversations.c.head))


_MINE: Final = conversations.c.owner == bindparam("owner")
_REF: Final = select(conversations.c.head, conversations.c.expires_at).where(
    _MINE, conversations.c.id == bindparam("id"), has_name(conversations.c.head)
)
_LOCKED: Final = _REF.with_for_update()
_COUNT: Final = select(func.count()).select_from(conversations).where(_MINE, has_name(conversations.c.head))
_OWN: Final = and_(responses.c.owner == bindparam("owner"), unexpired(bindparam("now")))
_KEPT: Final = (
    select(responses.c.id)
    .where(_OWN, has_name(responses.c.head), responses.c.head == bindparam("head"))
    .union_all(
        select(responses.c.id).where(_OWN, has_name(responses.c.input_head), responses.c.input_head == bindparam("head"))
    )
    .limit(1)
)
