"""How a run begins: a place, memory for its body and its events, and its response in the store, as queued.

    the client stays ──► the run, whose id it gets now                    an error ──► all is given back
    the client leaves while it is written ──► nobody knows the id: the response is deleted, behind the write that may be made

The place of a run that is withdrawn so is free when its response is gone: who begins and leaves has no more of them than who
stays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final
from uuid import uuid4

import orjson

from gateway.admission.memory import MemoryLease
from gateway.database.failures import StoreError, StoreFailed
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.responses.history import History
from gateway.errors import GatewayError, over_budget
from gateway.features.histories.histories import Histories, unavailable
from gateway.features.histories.records import StoredResponse
from gateway.features.responses.background.objects import queued_object
from gateway.features.runs.event_log import Key, Logs
from gateway.features.runs.places import RunPlaces
from gateway.features.runs.run import Run
from gateway.features.runs.run_request import RunRequest
from gateway.parser.parsing import edited
from gateway.request.client import Caller, ClientRequest

MAX_RUNS: Final = 1000
MAX_OWNED: Final = 200
FULL_RETRY_S: Final = 5


class RunStarter:
    """See the top of this file. places: that they take. withdrawals: those that are going on. clock: Unix seconds."""

    def __init__(self, histories: Histories, logs: Logs, runner: str, clock: Callable[[], float]) -> None:
        self.places = RunPlaces(MAX_RUNS, MAX_OWNED)
        self.withdrawals = set[asyncio.Task[None]]()
        self._histories = histories
        self._logs = logs
        self._runner = runner
        self._clock = clock

    async def begin(
        self, asked: ClientRequest, caller: Caller, api: ApiRequest, history: History, owner: str
    ) -> tuple[Run, RunRequest]:
        """Raises GatewayError 413, 429, 503."""
        account = asked.lease.account
        client = account.client
        if not self.places.admit(owner, client):
            raise self._full(owner)
        key, events, lease = (owner, f"resp_{uuid4().hex}"), account.lease(), account.lease()
        try:
            body = await _body(api, history, lease)
            run = await self._queued(key, client, history, api.model, (events, lease))
        except BaseException as error:
            events.close()
            lease.close()
            if isinstance(error, asyncio.CancelledError):
                self._withdraw(key, client)
            else:
                self.places.release(owner, client)
            raise
        return run, RunRequest(asked, caller, run, body, lease)

    async def _queued(
        self, key: Key, client: str, history: History, model: str, leases: tuple[MemoryLease, MemoryLease]
    ) -> Run:
        """leases: of its events, of its body."""
        events, lease = leases
        now = self._clock()
        response = queued_object(key[1], int(now), history, model)
        _charge(lease, len(response))
        stored = StoredResponse(
            owner=key[0],
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
            await (await self._histories.opened()).begin(stored, self._runner)
        except StoreFailed as failure:
            raise unavailable(failure) from None
        run = Run(key, client, int(now), response, self._logs, events)
        run.say("response.created")
        run.say("response.queued")
        return run

    def _withdraw(self, key: Key, client: str) -> None:
        async def work() -> None:
            try:
                with contextlib.suppress(StoreError):
                    await (await self._histories.opened()).delete(*key)
            finally:
                self.places.release(key[0], client)

        task = asyncio.get_running_loop().create_task(work(), name="withdraw a run")
        self.withdrawals.add(task)
        task.add_done_callback(self.withdrawals.discard)

    def _full(self, owner: str) -> GatewayError:
        if self.places.is_full(owner):
            whose = f"You have {MAX_OWNED} responses that run in the background, and it can be no more."
        else:
            whose = f"Of the {MAX_RUNS} responses that may run in the background here, your address has its share, or all run."
        text = f"{whose} Wait until one has ended, or cancel one."
        return GatewayError(429, "too_many_background_responses", text, retry_after_s=FULL_RETRY_S)


async def _body(api: ApiRequest, history: History, lease: MemoryLease) -> bytes:
    """What its request is: an ordinary stream."""
    values: Mapping[str, bytes] = {"background": b"false", "stream": b"true"}
    if api.alias:
        values = {**values, "model": orjson.dumps(api.alias)}  # it is looked up once more
    body = await edited(api.body, history.members.put_all(values))
    _charge(lease, len(body))
    return body


def _charge(lease: MemoryLease, size: int) -> None:
    if not lease.grow(size):
        raise over_budget(0, lease.account.largest, size)
