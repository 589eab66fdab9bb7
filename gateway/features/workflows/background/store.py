"""The store of background runs, in the database of stored responses.

    begin ──► queued ──► record, record, ... ──► finish                  by the runner, while it has the run
                  └── silent for ALIVE_S ──► adopt ──► another runner     by compare-and-set, MAX_ADOPTIONS times

Each write of a runner is conditional on the run still being its own: a gateway that was suspended, and whose run another one
has adopted, writes nothing more. All methods raise StoreFailed; methods that add something also StoreFullError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import orjson
from sqlalchemy import Connection, Select, and_, delete, insert, or_, select, tuple_, update

from gateway.database.database import Database
from gateway.features.histories.sizes import StoredSizes, change
from gateway.features.histories.tables import ROW
from gateway.features.runs.process_runs import ALIVE_S
from gateway.features.workflows.background.stored_run import (
    DELETED,
    LIVE,
    RUNNING,
    IdempotentRequest,
    RunKey,
    StepRow,
    StoredRun,
)
from gateway.features.workflows.background.tables import workflow_keys, workflow_runs, workflow_steps
from gateway.features.workflows.running.recorded import RunProgress

KEY_S: Final = 86_400.0  # of an Idempotency-Key, and of the row of a deleted run
_ROWS_PER_STEP: Final = 100
_COLUMNS: Final = tuple(StoredRun.__slots__)


class IdempotencyMismatchError(Exception):
    """Another body had this Idempotency-Key."""


class WorkflowRunStore:
    """ttl_s: lifetime of a run after its end. clock: Unix seconds."""

    def __init__(self, database: Database, sizes: StoredSizes, ttl_s: float, clock: Callable[[], float]) -> None:
        self._database = database
        self._sizes = sizes
        self._ttl_s = ttl_s
        self._clock = clock

    # -- clients

    async def begin(self, run: StoredRun, runner: str, request: IdempotentRequest) -> str:
        """Stores a queued run. Returns its id, or that of the run that a request with the same key has begun within KEY_S.

        Raises IdempotencyMismatchError.
        """
        now = self._clock()
        row = {name: getattr(run, name) for name in _COLUMNS}
        row |= {"runner": runner, "alive_until": now + ALIVE_S, "expires_at": 0.0, "size": run.size + ROW}

        def work(connection: Connection) -> str:
            if request.key and (earlier := self._earlier(connection, run.owner, request, now)):
                return earlier
            connection.execute(insert(workflow_runs).values(row))
            self._sizes.add(connection, run.owner, run.size + ROW)
            if request.key:
                found = {"owner": run.owner, "key": request.key, "run": run.id, "digest": request.digest}
                connection.execute(insert(workflow_keys).values(expires_at=now + KEY_S, **found))
            return run.id

        return await self._database.write(work)

    def _earlier(self, connection: Connection, owner: str, request: IdempotentRequest, now: float) -> str:
        """The run of an earlier request with this key; "": there is none. Raises IdempotencyMismatchError."""
        is_key = and_(workflow_keys.c.owner == owner, workflow_keys.c.key == request.key)
        found = connection.execute(select(workflow_keys).where(is_key).with_for_update()).one_or_none()
        if found is None:
            return ""
        if found.expires_at <= now:
            connection.execute(delete(workflow_keys).where(is_key))
            return ""
        if found.digest != request.digest:
            raise IdempotencyMismatchError
        return str(found.run)

    async def get(self, owner: str, id_: str) -> StoredRun | None:
        """None: there is none, or it has another owner, has expired or was deleted."""
        columns = [workflow_runs.c[name] for name in _COLUMNS]
        wanted = and_(_is(owner, id_), or_(workflow_runs.c.status.in_(LIVE), workflow_runs.c.expires_at > self._clock()))

        def work(connection: Connection) -> Any:
            return connection.execute(select(*columns).where(wanted, workflow_runs.c.status != DELETED)).one_or_none()

        row = await self._database.read(work)
        return StoredRun(**row._mapping) if row is not None else None

    async def ask_cancel(self, owner: str, id_: str) -> None:
        """Its runner ends it. Idempotent."""

        def work(connection: Connection) -> None:
            connection.execute(update(workflow_runs).where(_is(owner, id_), _live()).values(cancelled=1))

        await self._database.write(work)

    async def delete(self, owner: str, id_: str) -> bool:
        """Deletes a run and its steps; its runner stops. False: there is none. Idempotent within KEY_S."""
        now = self._clock()

        def work(connection: Connection) -> bool:
            row = connection.execute(select(workflow_runs.c.size).where(_is(owner, id_)).with_for_update()).one_or_none()
            if row is None:
                return False
            self._empty(connection, owner, id_, row.size)
            values = {"status": DELETED, "expires_at": now + KEY_S, "size": 0, "key_id": "", "tenant": ""}
            blobs = dict.fromkeys(("document", "spec", "receipt", "result"), b"")
            connection.execute(update(workflow_runs).where(_is(owner, id_)).values(**values, **blobs))
            return True

        return await self._database.write(work)

    # -- runners

    async def record(self, key: RunKey, runner: str, position: int, step: StepRow, progress: RunProgress | None) -> bool:
        """Records a step. progress: None: unchanged. False: another runner has the run, or it has ended. Idempotent, because
        the commit of an earlier try may be in doubt.
        """
        from_progress: dict[str, Any] = {}
        if progress is not None:
            from_progress = {"sequence": progress.number, "receipt": orjson.dumps(progress.receipt)}
        place = {"owner": key[0], "run": key[1], "step": step.name}
        is_step = and_(*(workflow_steps.c[name] == value for name, value in place.items()))

        def work(connection: Connection) -> bool:
            size = workflow_runs.c.size + step.size
            values = {"status": RUNNING, "size": size, **from_progress}
            changed: Any = connection.execute(update(workflow_runs).where(_mine(key, runner)).values(**values))
            if not changed.rowcount:
                return False
            connection.execute(delete(workflow_steps).where(is_step))
            rest = {"position": position, "status": step.status, "result": step.result, "usage": step.usage}
            connection.execute(insert(workflow_steps).values(**place, **rest))
            self._sizes.add(connection, key[0], step.size)
            return True

        return await self._database.write(work)

    async def finish(self, key: RunKey, runner: str, status: str, result: bytes, sequence: int) -> bool:
        """Stores the end of a run. False: another runner has it, or it was deleted. Idempotent, because the commit of an
        earlier try may be in doubt.
        """
        now = self._clock()
        ended = and_(_is(*key), workflow_runs.c.runner == runner, workflow_runs.c.status == status)

        def work(connection: Connection) -> bool:
            values = {"status": status, "result": result, "sequence": sequence, "expires_at": now + self._ttl_s}
            size = {"size": workflow_runs.c.size + len(result)}
            changed: Any = connection.execute(update(workflow_runs).where(_mine(key, runner)).values(**values, **size))
            if changed.rowcount:
                change(connection, key[0], len(result))
                return True
            return connection.execute(select(workflow_runs.c.id).where(ended)).one_or_none() is not None

        return await self._database.write(work)

    async def running_of(self, runner: str) -> dict[RunKey, bool]:
        """The runs that a runner has. True: its client has cancelled it."""
        columns = (workflow_runs.c.owner, workflow_runs.c.id, workflow_runs.c.cancelled)
        query = select(*columns).where(workflow_runs.c.runner == runner, _live())

        def work(connection: Connection) -> dict[RunKey, bool]:
            return {(row.owner, row.id): bool(row.cancelled) for row in connection.execute(query).all()}

        return await self._database.read(work)

    async def running_among(self, keys: Collection[RunKey]) -> set[RunKey]:
        """The runs that have not ended. keys: at most 1,000."""
        pairs = tuple_(workflow_runs.c.owner, workflow_runs.c.id).in_(list(keys))
        query = select(workflow_runs.c.owner, workflow_runs.c.id).where(pairs, _live())

        def work(connection: Connection) -> set[RunKey]:
            return {(row.owner, row.id) for row in connection.execute(query).all()}

        return await self._database.read(work)

    async def renew(self, runner: str, keys: Sequence[RunKey], *, released: bool = False) -> None:
        """Renews these runs of a runner. released: they are for any other one, at once."""
        values: dict[str, Any] = {"alive_until": self._clock() + ALIVE_S}
        if released:
            values = {"alive_until": 0.0, "runner": ""}

        def work(connection: Connection) -> None:
            for key in keys:
                connection.execute(update(workflow_runs).where(_mine(key, runner)).values(**values))

        await self._database.write(work)

    async def abandoned(self, limit: int) -> list[StoredRun]:
        """Runs whose runner has stopped, the longest silent first."""
        columns = [workflow_runs.c[name] for name in _COLUMNS]
        query = select(*columns).where(_live(), workflow_runs.c.alive_until <= self._clock())
        query = query.order_by(workflow_runs.c.alive_until).limit(limit)

        def work(connection: Connection) -> list[StoredRun]:
            return [StoredRun(**row._mapping) for row in connection.execute(query).all()]

        return await self._database.read(work)

    async def adopt(self, run: StoredRun, runner: str) -> bool:
        """Makes an abandoned run the runner's. A run that its runner has released is not counted. False: another one has it."""
        row = and_(
            _mine(run.key, run.runner),
            workflow_runs.c.alive_until == run.alive_until,
            workflow_runs.c.adoptions == run.adoptions,
        )
        adoptions = run.adoptions + (1 if run.runner else 0)
        values = {"runner": runner, "alive_until": self._clock() + ALIVE_S, "adoptions": adoptions}

        def work(connection: Connection) -> bool:
            changed: Any = connection.execute(update(workflow_runs).where(row).values(**values))
            return bool(changed.rowcount)

        return await self._database.write(work)

    async def steps(self, key: RunKey) -> list[StepRow]:
        """The recorded steps, in their order."""
        columns = [workflow_steps.c[name] for name in ("step", "status", "result", "usage", "position")]
        query = select(*columns).where(workflow_steps.c.owner == key[0], workflow_steps.c.run == key[1])

        def work(connection: Connection) -> list[StepRow]:
            return [StepRow(*row) for row in connection.execute(query.order_by(workflow_steps.c.position)).all()]

        return await self._database.read(work)

    # -- time

    async def purge(self) -> int:
        """Deletes some expired runs and keys. Returns their number; 0: none are left."""
        now = self._clock()
        ended = and_(workflow_runs.c.status.not_in(LIVE), workflow_runs.c.expires_at <= now)
        columns = (workflow_runs.c.owner, workflow_runs.c.id, workflow_runs.c.size)
        old_keys = workflow_keys.c.expires_at <= now

        def work(connection: Connection) -> int:
            query = select(*columns).where(ended).order_by(columns[0]).limit(_ROWS_PER_STEP)
            found = connection.execute(query.with_for_update()).all()
            for row in found:
                self._empty(connection, row.owner, row.id, row.size)
                connection.execute(delete(workflow_runs).where(_is(row.owner, row.id)))
            keys: Select[Any] = select(workflow_keys.c.owner, workflow_keys.c.key).where(old_keys).limit(_ROWS_PER_STEP)
            is_old = tuple_(workflow_keys.c.owner, workflow_keys.c.key).in_(keys)
            made: Any = connection.execute(delete(workflow_keys).where(is_old))
            return len(found) + int(made.rowcount)

        return await self._database.write(work)

    def _empty(self, connection: Connection, owner: str, id_: str, size: int) -> None:
        connection.execute(delete(workflow_steps).where(workflow_steps.c.owner == owner, workflow_steps.c.run == id_))
        connection.execute(delete(workflow_keys).where(workflow_keys.c.owner == owner, workflow_keys.c.run == id_))
        if size:
            change(connection, owner, -size)


def _is(owner: str, id_: str) -> Any:
    return and_(workflow_runs.c.owner == owner, workflow_runs.c.id == id_)


def _live() -> Any:
    return workflow_runs.c.status.in_(LIVE)


def _mine(key: RunKey, runner: str) -> Any:
    return and_(_is(*key), workflow_runs.c.runner == runner, _live())
