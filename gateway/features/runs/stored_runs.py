"""The store with runs: responses that are stored before they have an answer.

    begin ──► row of the response (queued) and row of the run ──► progress ──► finish: deletes the run's row, stores the answer
                                                                     └──────► cancel, delete, end_abandoned: delete the row, too

The run's row exists exactly while the response is queued or in progress. The transaction that deletes the row also writes the
end of the response, so there is only one end. A runner that does not find the row stops. So a client may send a request to any
process.

A runner renews its runs (`renew`). After `alive_until` a run is abandoned, because its process was killed. Then any process may
end it. Runs of living processes are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, tuple_, update

from gateway.database.database import Database
from gateway.features.histories import names
from gateway.features.histories.records import CANCELLED, FAILED, IN_PROGRESS, QUEUED, RUNNING, Item, RunEnd, StoredResponse
from gateway.features.histories.sizes import StoredSizes, change, release
from gateway.features.histories.tables import responses
from gateway.features.histories.turns import TurnStore
from gateway.features.runs.process_runs import ALIVE_S
from gateway.features.runs.run_format import RESTARTED, RunFailure, RunFormat
from gateway.features.runs.tables import runs

_ENDS_PER_STEP: Final = 100


class RunStore(TurnStore):
    """Stores runs. runner: the id of a process. All methods raise StoreFailed."""

    def __init__(
        self,
        database: Database,
        ttl_s: float,
        clock: Callable[[], float],
        format_: RunFormat,
        sizes: StoredSizes | None = None,
    ) -> None:
        super().__init__(database, ttl_s, clock, sizes)
        self._format = format_

    async def begin(self, response: StoredResponse, runner: str) -> None:
        """Stores a queued response and its run; durable when this returns."""
        now = self._clock()
        row = {"owner": response.owner, "id": response.id, "runner": runner, "alive_until": now + ALIVE_S}

        def work(connection: Connection) -> None:
            self._insert(connection, response, now)
            connection.execute(insert(runs).values(row))

        await self._database.write(work)

    async def progress(self, owner: str, id_: str, response: bytes) -> None:
        """Sets the status to in progress, unless the run has ended. response: the object with this status."""
        queued = and_(_is_response(owner, id_), responses.c.status == QUEUED)

        def work(connection: Connection) -> None:
            connection.execute(update(responses).where(queued).values(status=IN_PROGRESS, response=response))

        await self._database.write(work)

    async def finish(self, owner: str, id_: str, end: RunEnd, added: Sequence[Item] = (), conversation: str = "") -> bool:
        """Stores the end of a run. False: it had already ended, and nothing changes. added: items for its conversation, in the
        same transaction.

        Raises UnknownObjectError if its conversation does not exist, HistoryTooLargeError if that is full.
        """
        now = self._clock()

        def work(connection: Connection) -> bool:
            if not _delete_row(connection, owner, id_):
                return False
            values = {"status": end.status, "output": end.output, "response": end.response}
            size = responses.c.size + len(end.output)
            row = and_(_is_response(owner, id_), responses.c.emptied == 0)
            release(connection, responses, row, row=0)
            changed: Any = connection.execute(update(responses).where(row).values(size=size, **values))
            if changed.rowcount:  # otherwise it has expired in the meantime
                kept = connection.execute(select(func.length(responses.c.input)).where(row)).scalar_one()
                change(connection, owner, kept + len(end.output) + len(end.response))
                names.add(connection, owner, id_, end.names)
            if conversation:
                self._extend(connection, owner, conversation, added, now)
            return True

        return await self._database.write(work)

    async def cancel(self, owner: str, id_: str) -> None:
        """Cancels a run, unless it has ended."""

        def work(connection: Connection) -> None:
            if _delete_row(connection, owner, id_):
                self._end_without_answer(connection, owner, id_, CANCELLED)

        await self._database.write(work)

    async def delete(self, owner: str, id_: str) -> bool:
        """Deletes a response. False: there is none. Later turns lose their history; a running one is stopped."""
        now = self._clock()

        def work(connection: Connection) -> bool:
            connection.execute(delete(runs).where(_is_run(owner, id_)))
            condition = and_(_is_response(owner, id_), responses.c.emptied == 0, responses.c.expires_at > now)
            release(connection, responses, condition)
            if not connection.execute(delete(responses).where(condition)).rowcount:
                return False
            names.remove(connection, owner, id_)
            return True

        return await self._database.write(work)

    async def get(self, owner: str, id_: str) -> StoredResponse:
        """A response. An abandoned run has failed. Raises UnknownObjectError or ExpiredObjectError."""
        found = await super().get(owner, id_)
        if found.status not in RUNNING or await self.running(owner, id_):
            return found
        await self._end(owner, id_)
        return await super().get(owner, id_)

    async def running(self, owner: str, id_: str) -> bool:
        """True if the run exists and its runner is alive."""
        query = select(runs.c.id).where(_is_run(owner, id_), runs.c.alive_until > self._clock())

        def work(connection: Connection) -> bool:
            return connection.execute(query).first() is not None

        return await self._database.read(work)

    async def running_of(self, runner: str, others: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """(owner, id) of the runner's runs, and of the runs in `others` with a living runner.

        others: at most MAX_WATCHED (`watching.py`).
        """
        wanted = runs.c.runner == runner
        if others:
            theirs = tuple_(runs.c.owner, runs.c.id).in_(list(others))
            wanted = or_(wanted, and_(theirs, runs.c.alive_until > self._clock()))
        query = select(runs.c.owner, runs.c.id).where(wanted)

        def work(connection: Connection) -> set[tuple[str, str]]:
            return {(row.owner, row.id) for row in connection.execute(query).all()}

        return await self._database.read(work)

    async def renew(self, runner: str, ids: Collection[str]) -> None:
        """Renews these runs of a process. Runs unknown to the process, because `begin` seemed to fail, are abandoned."""
        until = self._clock() + ALIVE_S
        mine = and_(runs.c.runner == runner, runs.c.id.in_(list(ids)))

        def work(connection: Connection) -> None:
            connection.execute(update(runs).where(mine).values(alive_until=until))

        await self._database.write(work)

    async def sweep(self) -> int:
        return await super().sweep() + await self.end_abandoned()

    async def end_abandoned(self) -> int:
        """Ends some abandoned runs. Returns their number; 0: none are left."""
        query = select(runs.c.owner, runs.c.id).where(runs.c.alive_until <= self._clock()).limit(_ENDS_PER_STEP)

        def work(connection: Connection) -> list[tuple[str, str]]:
            return [(row.owner, row.id) for row in connection.execute(query).all()]

        found = await self._database.read(work)
        for owner, id_ in found:
            await self._end(owner, id_)
        return len(found)

    async def _end(self, owner: str, id_: str) -> None:
        """Ends a run as failed if it is abandoned."""
        now = self._clock()

        def work(connection: Connection) -> None:
            running = select(runs.c.id).where(_is_run(owner, id_), runs.c.alive_until > now)
            if connection.execute(running).first() is None:
                _delete_row(connection, owner, id_)
                self._end_without_answer(connection, owner, id_, FAILED, RESTARTED)

        await self._database.write(work)

    def _end_without_answer(
        self, connection: Connection, owner: str, id_: str, status: str, failure: RunFailure | None = None
    ) -> None:
        """Stores the end of a response without an answer."""
        row = and_(_is_response(owner, id_), responses.c.status.in_(list(RUNNING)), responses.c.emptied == 0)
        found: Any = connection.execute(select(responses.c.response).where(row)).scalars().first()
        if found is not None:
            response = self._format.in_state(found, status, failure)
            connection.execute(update(responses).where(row).values(status=status, response=response))


def _delete_row(connection: Connection, owner: str, id_: str) -> bool:
    """Deletes the run's row. True: this transaction did it."""
    return bool(connection.execute(delete(runs).where(_is_run(owner, id_))).rowcount)


def _is_run(owner: str, id_: str) -> Any:
    return and_(runs.c.owner == owner, runs.c.id == id_)


def _is_response(owner: str, id_: str) -> Any:
    return and_(responses.c.owner == owner, responses.c.id == id_)
