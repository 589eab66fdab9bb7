"""Tokens and their generations, in the database of stored responses.

    none ── claim ──► runs: runner, alive_until ── its turn is stored, in the same transaction ──► ended: turn
     ▲                  │         └── silent for ALIVE_S ── claim, by compare-and-set ──► runs, for another runner
     ├── withdraw ──────┤
     └── STOPPED_S ── stopped ◄── stop

A stopped token is free; its row is for waiting requests, which must not begin anew. A runner is one generation of one process.
All that it writes is conditional on the token still being its own. The owner is a part of every statement, so a token of
another owner is read like none. All methods raise StoreFailed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, delete, func, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.database.database import Database
from gateway.database.driver import SQLITE
from gateway.features.histories.tables import responses
from gateway.features.prompt_log.once.tables import once
from gateway.features.runs.process_runs import ALIVE_S

TOKEN_S: Final = 86_400.0  # a token is kept for a day
STOPPED_S: Final = 60.0  # a stopped token is remembered; longer than a wait for another process
MAX_TOKENS: Final = 10_000  # of an owner
_STOPPED: Final = "stopped"  # in place of a runner
_ROWS_PER_STEP: Final = 500

TokenKey = tuple[str, str]
"""(owner, token)."""


class TooManyTokensError(Exception):
    """The owner has MAX_TOKENS tokens."""


@dataclass(frozen=True, slots=True)
class StoredToken:
    """A row (`tables.py`)."""

    digest: str
    runner: str
    alive_until: float
    turn: str
    expires_at: float

    @property
    def stopped(self) -> bool:
        """True if its generation was stopped: the token is free."""
        return self.runner == _STOPPED


class OnceStore:
    """clock: Unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def find(self, key: TokenKey) -> StoredToken | None:
        """None: there is none, or it has expired."""
        row = await self._database.read(lambda connection: connection.execute(_FIND, _named(key)).one_or_none())
        found = StoredToken(*row) if row is not None else None
        return found if found is not None and (found.expires_at > self._clock() or self.is_alive(found)) else None

    def is_alive(self, found: StoredToken) -> bool:
        """True if it runs, and its runner is not silent."""
        return not found.turn and found.alive_until > self._clock()

    async def claim(self, key: TokenKey, digest: str, runner: str, seen: StoredToken | None) -> bool:
        """Makes a token the runner's. seen: as it was found. False: it has changed meanwhile. Raises TooManyTokensError."""
        now = self._clock()
        values = {"digest": digest, "runner": runner, "alive_until": now + ALIVE_S, "turn": "", "expires_at": now + TOKEN_S}
        as_found = _is_old(now) if seen is None else _is_as(seen)  # an expired one is as good as none

        def work(connection: Connection) -> bool:
            changed = connection.execute(update(once).where(_is(key), as_found).values(**values))
            if changed.rowcount:
                return True
            if seen is None:
                self._require_room(connection, key[0], now)
                dialect = sqlite if connection.dialect.name == SQLITE else postgresql
                made = dialect.insert(once).values(**_named(key), **values).on_conflict_do_nothing()
                if connection.execute(made).rowcount:
                    return True
            mine = connection.execute(_FIND, _named(key)).one_or_none()  # an earlier try may have been committed
            return mine is not None and mine.runner == runner

        return await self._database.write(work)

    def ended(self, key: TokenKey, runner: str) -> Callable[[Connection, str], None]:
        """The work in the transaction that stores the turn of a generation: its token has ended with it."""
        return partial(_end, key, runner, self._clock() + TOKEN_S)

    async def withdraw(self, key: TokenKey, runner: str) -> None:
        """The runner has no turn: the next request begins anew. Idempotent."""

        def work(connection: Connection) -> None:
            connection.execute(delete(once).where(_mine(key, runner)))

        await self._database.write(work)

    async def stop(self, key: TokenKey) -> bool:
        """Frees a token that runs; its runner stops. False: there is none, or it has ended."""
        now = self._clock()
        values = {"runner": _STOPPED, "alive_until": now, "expires_at": now + STOPPED_S}

        def work(connection: Connection) -> bool:
            running = and_(_is(key), once.c.turn == "", or_(once.c.expires_at > now, once.c.alive_until > now))
            changed = connection.execute(update(once).where(running, once.c.runner != _STOPPED).values(**values))
            return bool(changed.rowcount)

        return await self._database.write(work)

    async def mine(self, runners: Collection[str]) -> set[str]:
        """The runners that still have their tokens, ended or not."""
        query = select(once.c.runner).where(once.c.runner.in_(list(runners)))

        def work(connection: Connection) -> set[str]:
            return set(connection.execute(query).scalars())

        return await self._database.read(work)

    async def running_among(self, keys: Sequence[TokenKey]) -> set[TokenKey]:
        """The tokens whose generations run. keys: at most 1,000."""
        pairs = tuple_(once.c.owner, once.c.token).in_(list(keys))
        query = select(once.c.owner, once.c.token).where(pairs, once.c.turn == "", once.c.alive_until > self._clock())

        def work(connection: Connection) -> set[TokenKey]:
            return {(row.owner, row.token) for row in connection.execute(query).all()}

        return await self._database.read(work)

    async def renew(self, runners: Collection[str]) -> None:
        mine = and_(once.c.runner.in_(list(runners)), once.c.turn == "")
        values = {"alive_until": self._clock() + ALIVE_S}

        def work(connection: Connection) -> None:
            connection.execute(update(once).where(mine).values(**values))

        await self._database.write(work)

    async def expiry(self, owner: str, turn: str) -> float | None:
        """The expiry of a stored turn; None: it is gone."""
        query = select(responses.c.expires_at, responses.c.emptied).where(responses.c.owner == owner, responses.c.id == turn)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return float(row.expires_at) if row is not None and not row.emptied and row.expires_at > self._clock() else None

    async def purge(self) -> int:
        """Deletes some expired tokens. Returns their number; 0: none are left."""
        now = self._clock()

        def work(connection: Connection) -> int:
            old = select(once.c.owner, once.c.token).where(_is_old(now)).order_by(once.c.expires_at).limit(_ROWS_PER_STEP)
            made: Any = connection.execute(delete(once).where(tuple_(once.c.owner, once.c.token).in_(old)))
            return int(made.rowcount)

        return await self._database.write(work)

    def _require_room(self, connection: Connection, owner: str, now: float) -> None:
        """Raises TooManyTokensError."""
        count = connection.execute(_COUNT, {"owner": owner}).scalar_one()
        if count >= MAX_TOKENS:
            freed: Any = connection.execute(delete(once).where(once.c.owner == owner, _is_old(now)))
            if count - freed.rowcount >= MAX_TOKENS:
                raise TooManyTokensError


def _end(key: TokenKey, runner: str, expires_at: float, connection: Connection, turn: str) -> None:
    connection.execute(update(once).where(_mine(key, runner)).values(turn=turn, expires_at=expires_at))


def _named(key: TokenKey) -> dict[str, str]:
    return {"owner": key[0], "token": key[1]}


def _is(key: TokenKey) -> Any:
    return and_(once.c.owner == key[0], once.c.token == key[1])


def _mine(key: TokenKey, runner: str) -> Any:
    return and_(_is(key), once.c.runner == runner, once.c.turn == "")


def _is_old(now: float) -> Any:
    return and_(once.c.expires_at <= now, or_(once.c.turn != "", once.c.alive_until <= now))


def _is_as(found: StoredToken) -> Any:
    """A row is as it was found."""
    same = {"runner": found.runner, "alive_until": found.alive_until, "turn": found.turn, "expires_at": found.expires_at}
    return and_(*(once.c[name] == value for name, value in same.items()))


_FIND: Final = select(*(once.c[name] for name in StoredToken.__slots__)).where(
    once.c.owner == bindparam("owner"), once.c.token == bindparam("token")
)
_COUNT: Final = select(func.count()).select_from(once).where(once.c.owner == bindparam("owner"))
