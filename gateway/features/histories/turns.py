"""Turns of prompt logs: stored responses that are found by their heads, and their frames.

A head names a content, so several turns may have one. Their owner is a part of every look-up: a head of another owner is read
like an unknown one, by the same statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, literal, select, union, union_all, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.database.driver import SQLITE
from gateway.database.failures import StoreFailed
from gateway.features.histories import names
from gateway.features.histories.records import (
    RUNNING,
    TURN,
    ExpiredObjectError,
    FoundTurn,
    NextTurn,
    RefMove,
    StoredResponse,
    TurnNames,
    UnknownObjectError,
)
from gateway.features.histories.refs import RefStore
from gateway.features.histories.sizes import release
from gateway.features.histories.tables import ROW, frames, has_name, responses, unexpired

MAX_FOUND: Final = 100  # turns with one head, the newest first
DELETED_AT_ONCE: Final = 1000  # turns, in a transaction of some 50 ms
_DELETE_PAUSE_S: Final = 0.1  # between transactions, so that other processes can write, too


class TurnStore(RefStore):
    """Stores turns, in addition to refs. late_s: longest wait of an answer for its turn, which then is not stored.
    deleted_at_once: turns in a transaction; a parameter for tests.
    """

    late_s = 1.0
    deleted_at_once = DELETED_AT_ONCE

    async def put_turn(
        self,
        turn: StoredResponse,
        frame: bytes = b"",
        ttl_s: float = 0.0,
        move: RefMove | None = None,
        also: Callable[[Connection, str], None] | None = None,
        late_s: float = 0.0,
    ) -> float:
        """Stores a turn, or renews an equal one; it is durable when this returns. Returns its expiry in Unix seconds.

        frame: to be stored with it; b"": none. ttl_s: its lifetime; 0: the longest. move: of a ref, to its head. also: further
        work in the same transaction, with the turn's id. late_s: another longest wait; 0: that of an answer. Raises
        UnknownObjectError if its parent does not exist, or another response has its id.
        """
        now = self._clock()

        def work(connection: Connection) -> float:
            if turn.parent:
                parent = {"owner": turn.owner, "id": turn.parent, "now": now}
                if connection.execute(_ALIVE, parent).first() is None:
                    raise UnknownObjectError(turn.parent)
            expires_at = self._insert(connection, turn, now, ttl_s, renews=turn.id.startswith(TURN))
            if expires_at is None:
                raise UnknownObjectError(turn.id)
            if frame:
                self._put_frame(connection, turn, frame, expires_at)
            elif turn.log.frame:
                key = {f"its_{name}": value for name, value in _frame_key(turn).items()}
                connection.execute(_LONGER_FRAME, {**key, "until": expires_at})
            if move is not None:
                move.moved = self._moved_with_turn(connection, turn.owner, move, turn.log.head, now)
            if also is not None:
                also(connection, turn.id)
            return expires_at

        late_s = late_s or self.late_s
        try:
            async with asyncio.timeout(late_s):
                return await self._database.write(work)
        except TimeoutError:
            raise StoreFailed(f"the database took longer than {late_s:g} s") from None

    async def turns_at(self, owner: str, head: str) -> Sequence[FoundTurn]:
        """The turns of an owner with this head, or with this input head, the newest first. Raises UnknownObjectError or
        ExpiredObjectError.
        """

        def work(connection: Connection) -> Sequence[Any]:
            return connection.execute(_AT, {"owner": owner, "head": head}).all()

        rows, now = await self._database.read(work), self._clock()
        alive = [row for row in rows if not row.emptied and row.expires_at > now]
        if not alive:
            if rows:
                raise ExpiredObjectError("", self._ttl_s, max(row.expires_at for row in rows))
            raise UnknownObjectError("")
        return [FoundTurn(row.id, row.form, bool(row.at_input), _open(row), row.expires_at) for row in alive]

    async def issuers_at(self, owner: str, heads: Sequence[str]) -> frozenset[str]:
        """The issuers of the turns with these heads."""

        def work(connection: Connection) -> Sequence[str]:
            return connection.execute(_ISSUERS, {"owner": owner, "heads": list(heads)}).scalars().all()

        return frozenset(await self._database.read(work))

    async def going_on(self, owner: str, head: str, turns: Sequence[FoundTurn]) -> Sequence[NextTurn]:
        """The turns with an answer to the log with this head, and the turns that go on from it, the newest first. turns: at
        this head.
        """
        ended, begun = ([turn.id for turn in turns if turn.at_input is at_input] for at_input in (False, True))
        query = {"owner": owner, "head": head, "ended": ended, "begun": begun, "now": self._clock()}

        def work(connection: Connection) -> Sequence[Any]:
            return connection.execute(_NEXT, query).all()

        rows = await self._database.read(work)
        return [NextTurn(row.head, row.status, row.created_at, row.request_id) for row in rows]

    async def turn_with_id(self, owner: str, id_: str) -> tuple[FoundTurn, StoredResponse]:
        """One turn, or an ordinary response. Raises UnknownObjectError or ExpiredObjectError."""

        def work(connection: Connection) -> Any:
            return connection.execute(_ITS_EXPIRY, {"owner": owner, "id": id_}).scalar()

        row = await self.get(owner, id_)
        open_ = orjson.dumps(orjson.loads(row.log.open)[1]) if row.log.open else b"[]"
        expires_at = await self._database.read(work) or 0.0
        return FoundTurn(row.id, row.log.form, at_input=False, open=open_, expires_at=expires_at), row

    async def name_responses(self, owner: str, named: Mapping[str, TurnNames]) -> None:
        """Gives ordinary responses their names, by id. Responses with names keep them. Raises StoreFullError."""

        def work(connection: Connection) -> None:
            for id_, names_ in named.items():
                mine = and_(responses.c.owner == owner, responses.c.id == id_, responses.c.emptied == 0)
                values = {"head": names_.head, "input_head": names_.input_head, "digests": names_.digests, "open": names_.open}
                changed: Any = connection.execute(update(responses).where(mine, responses.c.head == "").values(**values))
                if changed.rowcount:
                    self._sizes.add(connection, owner, len(names_.digests) + len(names_.open))

        await self._database.write(work)

    async def delete_turns(self, owner: str, name: str, *, tree: bool, by_id: bool = False) -> int:
        """Deletes the turns with this head, and frames that no other turn names. tree: and all turns that are connected with
        them. by_id: the name is the id of a turn. Returns the number of turns. Runs in the background stay.

        A transaction deletes `deleted_at_once` turns, so that the turns of others can be stored in between.
        """
        column = responses.c.id if by_id else responses.c.head
        named = and_(responses.c.owner == owner, has_name(column), column == name)
        deleted = 0
        if tree:  # before the named turns, which name their trees
            roots = select(responses.c.root).where(named)
            deleted = await self._delete(owner, and_(responses.c.owner == owner, responses.c.root.in_(roots), column != name))
        return deleted + await self._delete(owner, named)

    async def _delete(self, owner: str, which: ColumnElement[bool]) -> int:
        """Deletes turns in steps. Returns their number."""
        wanted = and_(which, unexpired(self._clock()), responses.c.status.not_in(RUNNING))

        def work(connection: Connection) -> int:
            query = select(responses.c.id, responses.c.frame).where(wanted).limit(self.deleted_at_once)
            rows = connection.execute(query).all()
            these = and_(responses.c.owner == owner, responses.c.id.in_([row.id for row in rows]), wanted)
            release(connection, responses, these)
            count = connection.execute(delete(responses).where(these)).rowcount
            for row in rows:
                names.remove(connection, owner, row.id)
            for frame in sorted({row.frame for row in rows if row.frame}):
                self._delete_unused_frame(connection, owner, frame)
            return count

        deleted = step = await self._database.write(work)
        while step == self.deleted_at_once:
            await asyncio.sleep(_DELETE_PAUSE_S)
            step = await self._database.write(work)
            deleted += step
        return deleted

    async def frame(self, owner: str, name: str, form: str) -> bytes:
        """The frame with this name, as members of a body (JSON). Raises UnknownObjectError."""
        query = {"owner": owner, "name": name, "form": form, "now": self._clock()}
        body: bytes | None = await self._database.read(lambda connection: connection.execute(_FRAME, query).scalar())
        if body is None:
            raise UnknownObjectError("")
        return body

    def _delete_unused_frame(self, connection: Connection, owner: str, name: str) -> None:
        unused = and_(frames.c.owner == owner, frames.c.name == name)
        if connection.execute(select(frames.c.name).where(unused).limit(1)).first() is None:
            return  # nearly all turns of an owner may have an empty frame
        # A transaction that stores a turn of this owner waits, or is committed: both have changed the owner's size before.
        used = and_(
            responses.c.owner == owner, has_name(responses.c.frame), responses.c.frame == name, responses.c.emptied == 0
        )
        if connection.execute(select(responses.c.id).where(used).limit(1)).first() is None:
            release(connection, frames, unused)
            connection.execute(delete(frames).where(unused))

    def _put_frame(self, connection: Connection, turn: StoredResponse, body: bytes, expires_at: float) -> None:
        """Stores a frame, or renews it."""
        key = _frame_key(turn)
        known = connection.execute(select(frames.c.expires_at).where(_is_frame(**key))).scalar()
        if known is not None and known >= expires_at:
            return
        row = {**key, "body": body, "expires_at": expires_at}
        connection.execute(_RENEW_SQLITE if connection.dialect.name == SQLITE else _RENEW_POSTGRES, row)
        if known is None:
            self._sizes.add(connection, turn.owner, len(body) + ROW)


def _open(row: Any) -> bytes:
    """The open calls at the head that was looked for."""
    return orjson.dumps(orjson.loads(row.open)[0 if row.at_input else 1]) if row.open else b"[]"


def _is_frame(owner: Any, name: Any, form: Any) -> Any:
    return and_(frames.c.owner == owner, frames.c.name == name, frames.c.form == form)


def _frame_key(turn: StoredResponse) -> dict[str, str]:
    return {"owner": turn.owner, "name": turn.log.frame, "form": turn.log.form}


def _renew(dialect: Any) -> Any:
    made = dialect.insert(frames)
    return made.on_conflict_do_update(index_elements=["owner", "name", "form"], set_={"expires_at": made.excluded.expires_at})


def _next() -> Any:
    """Selects the turns with an input head, the turns after the answers of others (ended), and after their inputs (begun)."""
    columns = [responses.c[name] for name in ("head", "status", "created_at", "id", "request_id")]
    mine = and_(responses.c.owner == bindparam("owner"), unexpired(bindparam("now")))

    def newest(*conditions: Any) -> Any:
        """Each part in the order of its index: a log may have any number of turns after it."""
        found = select(*columns).where(mine, *conditions).order_by(responses.c.created_at.desc()).limit(MAX_FOUND)
        return select(found.subquery())

    answers = newest(has_name(responses.c.input_head), responses.c.input_head == bindparam("head"))
    after = [
        newest(
            has_name(responses.c.head),
            responses.c.parent.in_(bindparam(name, expanding=True)),
            responses.c.after_input == side,
        )
        for side, name in enumerate(("ended", "begun"))
    ]
    every = union(answers, *after).subquery()
    return select(every).order_by(every.c.created_at.desc(), every.c.id).limit(MAX_FOUND)


def _at() -> Any:
    """Selects the turns with a head, and the turns with an input head; each part names its partial index's condition."""
    columns = [responses.c[name] for name in ("id", "form", "emptied", "expires_at", "created_at", "open")]
    mine = responses.c.owner == bindparam("owner")
    head, input_head = responses.c.head, responses.c.input_head
    ended = select(*columns, literal(0).label("at_input")).where(mine, has_name(head), head == bindparam("head"))
    begun = select(*columns, literal(1).label("at_input")).where(
        mine, has_name(input_head), input_head == bindparam("head"), input_head != head
    )
    both = union_all(ended, begun).subquery()
    return select(both).order_by(both.c.emptied, both.c.created_at.desc(), both.c.id).limit(MAX_FOUND)


_AT: Final = _at()
_ISSUERS: Final = (
    select(responses.c.issuer)
    .distinct()
    .where(
        responses.c.owner == bindparam("owner"),
        has_name(responses.c.head),
        responses.c.head.in_(bindparam("heads", expanding=True)),
        responses.c.issuer != "",
    )
)
_NEXT: Final = _next()
_ITS_EXPIRY: Final = select(responses.c.expires_at).where(
    responses.c.owner == bindparam("owner"), responses.c.id == bindparam("id")
)
_ALIVE: Final = select(responses.c.id).where(
    responses.c.owner == bindparam("owner"),
    responses.c.id == bindparam("id"),
    unexpired(bindparam("now")),
)
_FRAME: Final = select(frames.c.body).where(
    _is_frame(bindparam("owner"), bindparam("name"), bindparam("form")), frames.c.expires_at > bindparam("now")
)
_LONGER_FRAME: Final = (  # a turn has named it
    update(frames)
    .where(_is_frame(*map(bindparam, ("its_owner", "its_name", "its_form"))), frames.c.expires_at < bindparam("until"))
    .values(expires_at=bindparam("until"))
)
_RENEW_SQLITE: Final = _renew(sqlite)
_RENEW_POSTGRES: Final = _renew(postgresql)
