"""The background runs of this process: started, adopted, cancelled, handed over.

    start ──► stored as queued, durably ──► a task ──► each outcome is stored, then the run goes on ──► its end is stored
      │                                      ▲  ▲
      └──► the client gets its id            │  └── every TICK_S: cancelled, deleted or adopted elsewhere?
      a runner is silent for ALIVE_S ── adopt ┘     every RENEW_S: it is alive

A shutdown does not end runs: they are released, and any gateway on the same store goes on with them at once. A run that has
stopped MAX_ADOPTIONS gateways fails. Places are shared with background responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import orjson

from gateway.admission.memory import MemoryLease
from gateway.core import Core
from gateway.database.failures import StoreError, StoreFailed
from gateway.errors import GatewayError, bad_request, over_budget, shutting_down
from gateway.features.histories.histories import full, unavailable
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.records import StoreFullError
from gateway.features.runs.beginning import places_full
from gateway.features.runs.event_log import Logs
from gateway.features.runs.places import RunPlaces
from gateway.features.runs.process_runs import TICK_S, ProcessRuns
from gateway.features.runs.runs import Runs
from gateway.features.workflows.background.background_run import BackgroundRun
from gateway.features.workflows.background.journal import RETRY_S, StoredRunJournal
from gateway.features.workflows.background.stored_run import (
    CALLED,
    EVENTS_SHIFT,
    FAILED,
    IdempotentRequest,
    RunKey,
    StoredRun,
    order_of,
    step_of,
    stored_run,
    unfinished,
)
from gateway.features.workflows.language.faults import DocumentError
from gateway.features.workflows.metrics import WorkflowsMetrics
from gateway.features.workflows.recent_runs import RecentRuns
from gateway.features.workflows.running.origin import AdoptedRunOrigin, RunOrigin
from gateway.features.workflows.running.recorded import ResumedRun
from gateway.features.workflows.running.run import WorkflowRun
from gateway.features.workflows.running.run_order import RunOrder, RunServices
from gateway.request.client import ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.owner import owner
from gateway.telemetry.notices import Notices

if TYPE_CHECKING:
    from gateway.features.workflows.background.store import WorkflowRunStore

log = logging.getLogger("warmroute.workflows")

LOOK_S: Final = 5.0
MAX_ADOPTIONS: Final = 3
MAX_UNANSWERED: Final = 1000
_ADOPTED_AT_ONCE: Final = 10
_SETTLED_AT_ONCE: Final = 100
_PATH: Final = "/v1/workflows/runs"
INTERRUPTED: Final = {
    "code": "run_interrupted",
    "message": f"{MAX_ADOPTIONS + 1} gateways have stopped while they had this run.",
}


class BackgroundRuns(ProcessRuns[BackgroundRun]):
    """The runs of one process (see the module)."""

    unsynchronized = "background runs of workflows cannot be compared with the store"

    def __init__(self, core: Core, services: RunServices, recent: RecentRuns) -> None:
        runs = core.part(Runs)  # of the same feature as the store
        super().__init__(runs.logs if runs is not None else Logs(), core.clock)
        self._places = runs.places if runs is not None else RunPlaces(0, 0)
        self._state: LazyStore[Any] | None = core.part(LazyStore)
        self._core = core
        self._services = services
        self._recent = recent
        self._metrics = core.metrics.of(WorkflowsMetrics)
        self._store: WorkflowRunStore | None = None
        self._unanswered = dict[RunKey, bool]()  # runs without a client; True: it may come back. In order
        self._closing = False
        self._looked = -LOOK_S
        self._notices = Notices(core.clock, most=1)
        core.work.finishes.append(self.close)

    @property
    def on(self) -> bool:
        """True if there is a store."""
        return self._state is not None

    def find(self, key: RunKey) -> BackgroundRun | None:
        return self._runs.get(key)

    async def open(self) -> WorkflowRunStore:
        """The store. Raises GatewayError 400 if it is off, StoreFailed."""
        if self._state is None:
            text = "Runs in the background need a store, which is off here (state.url); leave 'background' out."
            raise bad_request(text, "background", "state_off")
        if self._store is None:
            state = await self._state.get()
            from gateway.features.workflows.background.store import WorkflowRunStore

            if self._store is None:  # else another request has opened it in the meantime
                self._store = WorkflowRunStore(state.database, state.sizes, state.ttl_s, self._core.wall_clock)
                self._state.sweeps.append(self._store.purge)
        return self._store

    # -- starts

    async def start(self, exchange: Exchange, order: RunOrder, request: IdempotentRequest, size: int) -> StoredRun:
        """Stores and starts a run, or finds the run of an earlier request with the same key. size: of the body.
        Raises GatewayError.
        """
        core, caller = self._core, exchange.caller
        if core.running.draining or self._closing:
            raise shutting_down()
        core.callers.require_welcome(caller)
        account = exchange.request.lease.account
        key, client = (owner(exchange.request, caller), f"run_{uuid4().hex}"), account.client
        try:
            store = await self.open()
        except StoreFailed as failure:
            raise unavailable(failure) from None
        if not self._places.admit(key[0], client):
            raise places_full(self._places, key[0])
        lease = account.lease()
        one = BackgroundRun(key, client, lease, self.logs)
        try:
            if not lease.grow(size):
                raise over_budget(0, account.largest, size)
            self._compose(one, order, RunOrigin(exchange.request, key[1], lease), store, None)
            key_id = caller.grant.id if caller.grant is not None else ""
            stored = stored_run(key, order, one.run.created_at, (caller.tenant, key_id))
            begun = await self._begin(store, stored, request)
        except BaseException:
            self._drop(one, forget=True)
            raise
        if begun != key[1]:
            self._drop(one, forget=True)
            found = await store.get(key[0], begun)
            if found is None:
                raise GatewayError(503, "state_unavailable", "The run of this Idempotency-Key was deleted just now. Retry.")
            return found
        self._start(one)
        return stored

    async def _begin(self, store: WorkflowRunStore, stored: StoredRun, request: IdempotentRequest) -> str:
        from gateway.features.workflows.background.store import IdempotencyMismatchError

        try:
            return await store.begin(stored, self.runner, request)
        except StoreFullError as failure:
            raise full(failure) from None
        except IdempotencyMismatchError:
            text = "Another body had this Idempotency-Key within the last day. Send another key."
            raise GatewayError(409, "idempotency_mismatch", text) from None
        except StoreFailed as failure:
            if failure.in_doubt:
                self._leave(stored.key, request)
            raise unavailable(failure) from None
        except asyncio.CancelledError:
            self._leave(stored.key, request)
            raise

    def _leave(self, key: RunKey, request: IdempotentRequest) -> None:
        """A run that may be stored, and whose id no client has: as soon as the store answers it is deleted, or handed over if
        the client may repeat its request with the same Idempotency-Key.
        """
        self._unanswered[key] = bool(request.key)
        if len(self._unanswered) > MAX_UNANSWERED:  # the oldest one, if it is stored, runs
            del self._unanswered[next(iter(self._unanswered))]

    async def _settle_unanswered(self, store: WorkflowRunStore) -> None:
        """Raises StoreFailed."""
        while some := list(self._unanswered.items())[:_SETTLED_AT_ONCE]:
            await asyncio.gather(*(store.delete(*key) for key, repeatable in some if not repeatable))
            await store.renew(self.runner, [key for key, repeatable in some if repeatable], released=True)
            for key, _ in some:
                self._unanswered.pop(key, None)

    def _compose(
        self, one: BackgroundRun, order: RunOrder, asked: ClientRequest, store: WorkflowRunStore, resumed: ResumedRun | None
    ) -> None:
        one.journal = StoredRunJournal(store, one.key, self.runner, one.release, self._goes_down, resumed)
        one.run = WorkflowRun(one.key[1], order, asked, self._services, one.emit, one.journal)

    def _goes_down(self) -> bool:
        return self._closing or self._core.running.over

    def _start(self, one: BackgroundRun) -> None:
        self._runs[one.key] = one
        one.task = asyncio.get_running_loop().create_task(self._run(one), name=one.key[1])
        one.task.add_done_callback(lambda _task: self._ended(one))  # also if it is cancelled before it begins

    async def _run(self, one: BackgroundRun) -> None:
        begun = self._core.clock()
        self._recent.begin(one.run)
        try:
            await one.run.run()
            self._metrics.count_run(one.run, self._core.clock() - begun)
        except asyncio.CancelledError:
            if not one.released:
                raise
            if await self._is_deleted(one):
                self._metrics.count_run(one.run, self._core.clock() - begun)
        except Exception:  # a bug: another gateway may go on with it
            log.exception("a run failed by a bug", extra={"run": one.key[1]})
            one.released = True
        finally:
            self._recent.end(one.run)

    async def _is_deleted(self, one: BackgroundRun) -> bool:
        """True if a released run goes on nowhere. Waits for the store."""
        while not self._goes_down() and self._store is not None:
            with contextlib.suppress(StoreError):
                return await self._store.get(*one.key) is None
            await asyncio.sleep(RETRY_S)
        return False

    def _ended(self, one: BackgroundRun) -> None:
        del self._runs[one.key]
        self._drop(one, forget=one.released)

    def _drop(self, one: BackgroundRun, *, forget: bool) -> None:
        """Frees its place and its memory. forget: also its events."""
        self._places.release(one.key[0], one.client)
        one.lease.close()
        if forget:
            self.logs.forget(one.key)
        else:
            self.logs.end(one.key, self._core.clock())

    # -- the other processes

    async def watch(self, *, at_once: bool) -> None:
        """Compares the runs with the store, and adopts runs of gateways that have stopped, until cancelled. at_once: the store
        may have such runs; else it is opened by the first request that needs it.
        """
        while self._state is not None:
            if at_once or self._state.is_open:
                try:
                    await self._synchronize()
                except StoreFailed as failure:
                    self._notices.say("store", log.warning, self.unsynchronized, {"reason": str(failure)})
            self.logs.expire(self._core.clock())
            await asyncio.sleep(TICK_S)

    async def _synchronize(self) -> None:
        store, mine, now = await self.open(), list(self._runs.values()), self._core.clock()
        if mine:
            running = await store.running_of(self.runner)
            for one in mine:
                if one.key not in running:
                    one.release()
                elif running[one.key]:
                    one.run.cancel()
            await self._renew(lambda: store.renew(self.runner, [one.key for one in mine]))
        await self._settle_unanswered(store)
        if theirs := self.watched.keys():
            self.watched.end_missing(await store.running_among(theirs), theirs)
        if now - self._looked >= LOOK_S and not self._goes_down() and not self._core.running.draining:
            self._looked = now
            for stored in await store.abandoned(_ADOPTED_AT_ONCE):
                await self._adopt(store, stored)

    async def _adopt(self, store: WorkflowRunStore, stored: StoredRun) -> None:
        """Goes on with a run, unless another gateway does. Raises StoreFailed."""
        client = stored.owner or "local"
        if not self._places.admit(stored.owner, client):
            return
        lease, started = self._core.memory.lease(client), False
        try:
            if await store.adopt(stored, self.runner):
                self._metrics.adoptions.add(("silent" if stored.runner else "handed_over",))
                extra = {"run": stored.id, "adoptions": stored.adoptions + bool(stored.runner)}
                log.warning("a run goes on here: its gateway has stopped", extra=extra)
                started = await self._resume(store, stored, lease)
        finally:
            if not started:
                self._places.release(stored.owner, client)
                lease.close()

    async def _resume(self, store: WorkflowRunStore, stored: StoredRun, lease: MemoryLease) -> bool:
        """False: it has failed, and that is stored. Raises StoreFailed."""
        first = ((stored.sequence >> EVENTS_SHIFT) + 1) << EVENTS_SHIFT
        error, order = INTERRUPTED, None
        if not stored.runner or stored.adoptions < MAX_ADOPTIONS:
            try:
                order = await asyncio.to_thread(order_of, stored)
            except DocumentError as failure:  # of another release
                error = {"code": "workflow_invalid", "message": str(failure.faults[0])}
        if order is None:
            result = orjson.dumps(unfinished(stored, FAILED, error))
            await store.finish(stored.key, self.runner, FAILED, result, first)
            return False
        rows = await store.steps(stored.key)
        resumed = ResumedRun(
            number=first,
            created_at=stored.created_at,
            position=max((row.position for row in rows), default=-1) + 1,
            steps=[step_of(row) for row in rows if row.status != CALLED],
            called=frozenset(row.name for row in rows if row.status == CALLED),
            receipt=orjson.loads(stored.receipt) if stored.receipt else {},
            cancelled=bool(stored.cancelled),
        )
        lease.grow(stored.size)
        one = BackgroundRun(stored.key, lease.account.client, lease, self.logs, first)
        self._compose(one, order, AdoptedRunOrigin(_PATH, stored.tenant, stored.key_id, lease), store, resumed)
        self._start(one)
        return True

    async def close(self) -> None:
        """Releases all runs. Idempotent."""
        self._closing = True
        mine = list(self._runs.values())
        await self._end_all(BackgroundRun.release)
        released = [one.key for one in mine if one.released]
        if self._store is not None and (released or self._unanswered):
            try:
                await self._store.renew(self.runner, released, released=True)
                await self._settle_unanswered(self._store)
            except StoreFailed as failure:
                log.warning("runs are not handed over before they seem dead", extra={"reason": str(failure)})
