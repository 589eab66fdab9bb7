"""A store that is opened at its first use, because its libraries take half a second and 35 MB, and most gateways never need it.
If it was used before, or the configuration names it, it is opened in the background of the start.

If the database cannot be opened, every `get` of the next RETRY_S seconds fails at once, with the same reason; the first one
after that tries again. Callers refuse the request, or serve it without the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from gateway.database.failures import StoreFailed
from gateway.database.places import SQLITE, file_of, with_path

if TYPE_CHECKING:
    from gateway.database.database import Database
    from gateway.features.histories.store import HistoryStore

    Make = Callable[[Database, float, Callable[[], float]], "S_co"]

S_co = TypeVar("S_co", bound="HistoryStore", covariant=True)

log = logging.getLogger("warmroute.state")

FILE: Final = "responses.sqlite"
RETRY_S: Final = 5.0
LATE_S: Final = 1.0
OPEN_S: Final = 30.0  # the longest wait for it; a migration of many rows takes longer
PURGE_S: Final = 60.0
_PURGE_PAUSE_S: Final = 0.1  # between transactions, so that requests can write


class LazyStore(Generic[S_co]):
    """load: imports the store, in a thread, and returns its constructor: (database, ttl_s, clock). url: from the configuration.
    lost: called once if SQLite's file was deleted or replaced. clock: Unix seconds. pause_clock: monotonic seconds. late_s: the
    longest wait for it of work that can do without.

    open_s: the longest wait for its opening; a parameter for tests.

    tables: modules of features that add tables to the schema, imported before the store is opened. sweeps: periodic work of
    features on the open store; each returns the number of changed objects, 0: nothing is left to do.
    """

    def __init__(
        self,
        load: Callable[[], Make[S_co]],
        url: str,
        ttl_s: float,
        lost: Callable[[], None],
        clock: Callable[[], float] = time.time,
        pause_clock: Callable[[], float] = time.monotonic,
        late_s: float = LATE_S,
    ) -> None:
        self._load = load
        self._url = with_path(url, FILE)
        self._is_wanted = url != SQLITE  # a default may never be used
        self._ttl_s = ttl_s
        self._lost = lost
        self._clock = clock
        self._pause_clock = pause_clock
        self._late_s = late_s
        self.open_s = OPEN_S
        self.tables: list[str] = []
        self.sweeps: list[Callable[[], Awaitable[int]]] = []
        self._store: S_co | None = None
        self._opening: asyncio.Task[tuple[S_co | None, str]] | None = None
        self._failure: tuple[float, str] | None = None

    @property
    def url(self) -> str:
        """With a path, for SQLite."""
        return self._url

    @property
    def is_open(self) -> bool:
        return self._store is not None

    async def get(self) -> S_co:
        """The store; the first call opens it. Waits open_s at most. Raises StoreFailed."""
        if self._store is not None:
            return self._store
        try:
            async with asyncio.timeout(self.open_s):
                store, failure = await asyncio.shield(self._begun())  # others wait, too
        except TimeoutError:
            raise StoreFailed(f"to open it takes longer than {self.open_s:g} s") from None
        if store is None:
            raise StoreFailed(failure)
        return store

    async def get_soon(self) -> S_co:
        """`get`, for work that can do without the store: waits late_s at most. Raises StoreFailed."""
        try:
            async with asyncio.timeout(self._late_s):
                return await self.get()
        except TimeoutError:
            raise StoreFailed(f"to open it takes longer than {self._late_s:g} s") from None

    def begin(self) -> None:
        """Opens it in the background, for work that needs it later. Raises StoreFailed."""
        if self._store is None:
            self._begun()

    async def open_used(self) -> None:
        """Opens it if the configuration names it, or if the default was used before: its file exists."""
        path = file_of(self._url)
        if self._is_wanted or path is None or await asyncio.to_thread(path.is_file):
            with contextlib.suppress(StoreFailed):  # it is logged
                await self.get()

    async def run(self) -> None:
        """Open the store at the start (`open_used`). Remove expired responses from it every PURGE_S, until cancelled."""
        await self.open_used()
        while True:
            await asyncio.sleep(PURGE_S)
            try:
                more = self._store is not None
                while more and self._store:
                    more = bool(await self._store.sweep() + sum([await sweep() for sweep in self.sweeps]))
                    await asyncio.sleep(_PURGE_PAUSE_S)
            except StoreFailed as failure:
                log.warning("expired responses could not be removed", extra={"reason": str(failure)})

    async def close(self) -> None:
        """Execute the queued writes and close the store. A migration is given up, and its transaction. Idempotent."""
        if self._opening is not None:
            _, late = await asyncio.wait([self._opening], timeout=self.open_s)
            for task in late:
                task.cancel()
                await asyncio.wait([task])
        store, self._store = self._store, None
        if store:
            await store.close()

    def _begun(self) -> asyncio.Task[tuple[S_co | None, str]]:
        """Raises StoreFailed after a recent failure."""
        if self._opening is None:
            if self._failure and self._pause_clock() < self._failure[0] + RETRY_S:
                raise StoreFailed(self._failure[1])
            self._opening = asyncio.get_running_loop().create_task(self._opened(), name="open store")
        return self._opening

    async def _opened(self) -> tuple[S_co | None, str]:
        """The store; or None, and why it cannot be opened."""
        try:
            self._store, self._failure = await self._open(), None
        except StoreFailed as failure:
            self._failure = self._pause_clock(), str(failure)
            log.error("responses cannot be stored", extra={"reason": str(failure)})
            return None, str(failure)
        finally:
            self._opening = None
        return self._store, ""

    async def _open(self) -> S_co:
        make = await asyncio.to_thread(self._loaded)
        from gateway.database.database import Database
        from gateway.features.histories.tables import TABLES

        database = Database(self._url, TABLES, lost=self._lost)
        await database.open()
        return make(database, self._ttl_s, self._clock)

    def _loaded(self) -> Make[S_co]:
        for module in self.tables:
            importlib.import_module(module)
        return self._load()
