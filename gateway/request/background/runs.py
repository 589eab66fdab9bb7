"""The runs of this process: responses that are made in the background, without a client connection.

    start ──► kept as queued, durably ──► a task: the ordinary lifecycle, as any request ──► settle: how it has ended is kept,
                  │                                     ▲                                          its log ends, too
                  └──► the client is answered           └── stop: cancelled or deleted, here or (seen within TICK_S) elsewhere

The store decides how a run has ended (`state/runs.py`); what is here follows it. While the store does not answer, an end waits
in its task, and the run still counts. Bounds: MAX_RUNS of a process, MAX_OWNED of an owner.

A shutdown waits for runs as for requests; what has not ended then fails. A process that is killed says nothing: its runs fail
when it has been silent for `state.runs.ALIVE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter as Counts
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from uuid import uuid4

import orjson

from gateway.admission.memory import MemoryLease
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.responses.background.objects import CANCELLED, FAILED, LOST, RESTARTED, RUNNING, in_state, queued_object
from gateway.dialects.responses.background.replay import last_event_of
from gateway.dialects.responses.history import History
from gateway.errors import GatewayError, over_budget, shutting_down
from gateway.parser.parsing import edited
from gateway.request.background.event_log import Key, Logs
from gateway.request.background.run_request import Run, RunRequest
from gateway.request.client import Caller, ClientReply, ClientRequest
from gateway.request.running import Running
from gateway.state.histories import Histories, unavailable
from gateway.state.records import Item, RunEnd, StateError, StoredResponse, StoreFailed
from gateway.telemetry.counters import Counter

log = logging.getLogger("warmroute.state")

MAX_RUNS: Final = 1000
MAX_OWNED: Final = 200
MAX_WATCHED: Final = 1000  # runs of other processes that clients wait for
TICK_S: Final = 1.0
RENEW_S: Final = 10.0
CLOSE_S: Final = 5.0
SETTLE_S: Final = 600.0  # that an end waits for the store
FULL_RETRY_S: Final = 5

Serve = Callable[[ClientRequest], Awaitable[ClientReply]]


class Runs:
    """See the top of this file. ended: counter by status. clock: Unix seconds. timer: monotonic seconds."""

    def __init__(
        self,
        histories: Histories,
        running: Running,
        ended: Counter,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        logs: Logs | None = None,
    ) -> None:
        self.runner = uuid4().hex
        self.logs = logs or Logs()
        self._histories = histories
        self._running = running
        self._ended = ended
        self._clock = clock
        self._timer = timer
        self._runs: dict[Key, Run] = {}
        self._owned = Counts[str]()  # those that begin, too
        self._watched: dict[Key, list[asyncio.Future[None]]] = {}
        self._some = asyncio.Event()  # there is something to look after
        self._closing = False
        self._withdrawals = set[asyncio.Task[None]]()
        self._renewed = 0.0

    # -- for requests

    async def start(
        self, asked: ClientRequest, caller: Caller, api: ApiRequest, history: History, owner: str, serve: Serve
    ) -> Run:
        """A new run, which is kept. asked: the request that asks for it. serve: the lifecycle. Raises GatewayError 429, 503."""
        self._require_room(owner)
        self._owned[owner] += 1
        account = asked.lease.account
        events, lease, begun = account.lease(), account.lease(), False
        try:
            run, request = await self._begin(asked, caller, api, history, (owner, events, lease))
            begun = True
        finally:
            if not begun:
                self._release(owner)
                events.close()
                lease.close()
        self._runs[run.key] = run
        self._some.set()
        run.task = asyncio.get_running_loop().create_task(self._run(run, request, serve), name="background run")
        return run

    def stop(self, owner: str, id_: str) -> None:
        """It was cancelled, or deleted, in the store."""
        if run := self._runs.get((owner, id_)):
            run.stopped = True
            if run.task and run.begun and not run.settling:
                run.task.cancel("cancelled by its client")

    async def over(self, key: Key) -> None:
        """Wait until a run of another process has ended. Raises GatewayError 429."""
        if key not in self._watched and len(self._watched) >= MAX_WATCHED:
            raise GatewayError(
                429, "too_many_followed", "Too many responses are followed here. Poll for this one.", retry_after_s=1
            )
        waiter = asyncio.get_running_loop().create_future()
        self._watched.setdefault(key, []).append(waiter)
        self._some.set()
        try:
            await waiter
        finally:
            waiting = self._watched.get(key, [])
            if waiter in waiting:
                waiting.remove(waiter)
                if not waiting:
                    del self._watched[key]

    def __len__(self) -> int:
        return len(self._runs)

    # -- one run

    def _require_room(self, owner: str) -> None:
        if self._running.draining or self._closing:
            raise shutting_down()
        mine = self._owned[owner]
        if mine < MAX_OWNED and self._owned.total() < MAX_RUNS:
            return
        whose = f"You have {mine} responses" if mine >= MAX_OWNED else f"This gateway process has {MAX_RUNS} responses"
        text = f"{whose} that run in the background, and it can be no more. Wait until one has ended, or cancel one."
        raise GatewayError(429, "too_many_background_responses", text, retry_after_s=FULL_RETRY_S)

    def _release(self, owner: str) -> None:
        self._owned[owner] -= 1
        if not self._owned[owner]:
            del self._owned[owner]

    async def _begin(
        self,
        asked: ClientRequest,
        caller: Caller,
        api: ApiRequest,
        history: History,
        held: tuple[str, MemoryLease, MemoryLease],
    ) -> tuple[Run, RunRequest]:
        """held: the owner, the lease of its events, that of its body."""
        owner, events, lease = held
        values: Mapping[str, bytes] = {"background": b"false", "stream": b"true"}
        if api.alias:
            values = {**values, "model": orjson.dumps(api.alias)}  # it is looked up once more
        body = await edited(api.body, history.members.put_all(values))
        if not lease.grow(len(body)):
            raise over_budget(0, lease.account.largest, len(body))
        now = self._clock()
        key = owner, f"resp_{uuid4().hex}"
        response = queued_object(key[1], int(now), history, api.alias or api.model)
        if not lease.grow(len(response)):
            raise over_budget(0, lease.account.largest, len(response))
        stored = StoredResponse(
            owner=owner,
            id=key[1],
            parent=history.previous,
            conversation=history.conversation,
            created_at=now,
            status="queued",
            input=history.own,
            output=b"",
            response=response,
        )
        try:
            await (await self._histories.opened()).begin(stored, self.runner)
        except StoreFailed as failure:
            raise unavailable(failure) from None
        except asyncio.CancelledError:  # the client has left: nobody knows the id
            self._withdraw(key)
            raise
        run = Run(key, int(now), response, self.logs, events)
        run.say("response.created")
        run.say("response.queued")
        return run, RunRequest(asked, caller, run, body, lease)

    def _withdraw(self, key: Key) -> None:
        """Behind the write that may still be made."""

        async def work() -> None:
            with contextlib.suppress(StateError):
                await (await self._histories.opened()).delete(*key)

        task = asyncio.get_running_loop().create_task(work(), name="withdraw a run")
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _run(self, run: Run, request: RunRequest, serve: Serve) -> None:
        progress = asyncio.get_running_loop().create_task(self._progress(run))
        try:
            run.begun = True
            if not (run.stopped or self._closing):
                await serve(request)
        except (asyncio.CancelledError, ConnectionError):
            if not (run.stopped or self._closing or self._running.over):
                raise
        finally:
            run.settling = True
            progress.cancel()
            request.close()
            try:
                await self._settle(run)
            finally:
                self._over(run)

    async def _progress(self, run: Run) -> None:
        """Once a replica answers, the store says so."""
        await run.progressed.wait()
        try:
            await (await self._histories.opened()).progress(*run.key, run.response)
        except StoreFailed as failure:
            log.warning("the store does not say that a run is in progress", extra={"response": run.id, "reason": str(failure)})

    async def _settle(self, run: Run) -> None:
        """How it has ended is kept, and its clients are told."""
        status, until = "", self._timer() + SETTLE_S
        while not status:
            try:
                status = await self._settled(run)
            except StoreFailed as failure:
                log.warning("the end of a run is not kept yet", extra={"response": run.id, "reason": str(failure)})
                if self._closing or self._timer() > until:
                    break
                await asyncio.sleep(TICK_S)
            except Exception:  # a bug, which must not cost the run's clients its end
                log.exception("the end of a run cannot be kept", extra={"response": run.id})
                break
        if not run.told:
            error = RESTARTED if self._closing else LOST
            run.say_last(last_event_of(in_state(run.response, FAILED, error), run.log.next))
        self._ended.add((status or FAILED,))

    async def _settled(self, run: Run) -> str:
        """Its status at the end. Raises StoreFailed."""
        store, turn = await self._histories.opened(), run.turn
        if not (turn and turn.stored):
            end, items, conversation = self._end(run)
            try:
                await store.finish(*run.key, end, items, conversation)
            except StoreFailed:
                raise
            except StateError:  # its conversation is gone, or full
                assert turn
                turn.unwritten = None
                await store.finish(*run.key, self._end(run)[0])
        try:
            found = await store.get(*run.key)
            status, response = found.status, found.response
        except StoreFailed:
            raise
        except StateError:  # it was deleted
            status, response = CANCELLED, in_state(run.response, CANCELLED)
        if not run.told:
            run.say_last(last_event_of(response, run.log.next))
        return status if status not in RUNNING else FAILED

    def _end(self, run: Run) -> tuple[RunEnd, list[Item], str]:
        """What is to be kept, unless it has ended otherwise."""
        turn = run.turn
        if turn and turn.unwritten:
            end, items = turn.unwritten
            return end, items, turn.told.conversation
        interrupted = self._closing or self._running.over
        error = RESTARTED if interrupted else run.error()
        return RunEnd(FAILED, b"", in_state(run.response, FAILED, error)), [], ""

    def _over(self, run: Run) -> None:
        del self._runs[run.key]
        self._release(run.key[0])
        self.logs.end(run.key, self._timer())

    # -- beside the requests

    async def run(self) -> None:
        """See that the runs that were ended elsewhere stop, and say that this process lives; for ever."""
        while True:
            await self._some.wait()
            await asyncio.sleep(TICK_S)
            try:
                await self._look()
            except StoreFailed as failure:
                log.warning("the runs in the background cannot be looked after", extra={"reason": str(failure)})
            self.logs.expire(self._timer())
            if not (self._runs or self._watched or len(self.logs)):
                self._some.clear()

    async def _look(self) -> None:
        """Raises StoreFailed."""
        mine, theirs = list(self._runs.values()), list(self._watched)
        if not (mine or theirs):
            return
        store = await self._histories.opened()
        going = await store.going_of(self.runner, theirs)
        for run in mine:
            if run.key not in going and not (run.turn and run.turn.keeping):
                self.stop(*run.key)
        for key in theirs:
            if key not in going:
                for waiter in self._watched.pop(key, []):
                    if not waiter.done():
                        waiter.set_result(None)
        if mine and self._timer() - self._renewed >= RENEW_S:
            await store.renew(self.runner, [run.id for run in mine])
            self._renewed = self._timer()

    async def close(self) -> None:
        """What has not ended fails. Idempotent."""
        self._closing = True
        tasks = [*self._withdrawals, *(run.task for run in self._runs.values() if run.task)]
        for run in tuple(self._runs.values()):
            if run.task and run.begun and not run.settling:
                run.task.cancel("the gateway goes down")
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<Runs {len(self._runs)} running, {len(self._watched)} watched, {self.logs!r}>"
