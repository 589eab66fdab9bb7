"""The beginning of a run: it takes a place and memory for its body and its events, and is stored as queued.

    the client stays ──► it gets the id of the run                        an error ──► place and memory are released
    the client leaves during the write ──► nobody knows the id: the response is deleted, after the write

The place of a withdrawn run is released when its response is deleted, so clients that leave get no more places than others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from gateway.admission.memory import MemoryLease
from gateway.database.failures import StoreError, StoreFailed
from gateway.dialects.api_request import ApiRequest
from gateway.errors import GatewayError, over_budget
from gateway.features.histories.histories import unavailable
from gateway.features.histories.records import QUEUED, StoredResponse
from gateway.features.runs.event_log import Key, Logs
from gateway.features.runs.places import RunPlaces
from gateway.features.runs.run import Run
from gateway.features.runs.run_format import RunFormat
from gateway.features.runs.run_request import RunRequest
from gateway.request.client import ClientRequest

if TYPE_CHECKING:
    from gateway.features.runs.run import Opened

MAX_RUNS: Final = 1000
MAX_OWNED: Final = 200
FULL_RETRY_S: Final = 5


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to begin. owner, previous, conversation, input: of its StoredResponse. queued: makes its object of an id and the
    time. request: makes its request, and charges the body to the lease.
    """

    owner: str
    previous: str
    conversation: str
    input: bytes
    queued: Callable[[str, int], bytes]
    request: Callable[[MemoryLease], Awaitable[ApiRequest]]


class RunStarter:
    """See the top of this file. places: of all runs. withdrawals: running deletions. clock: Unix seconds."""

    def __init__(self, format_: RunFormat, opened: Opened, logs: Logs, runner: str, clock: Callable[[], float]) -> None:
        self.places = RunPlaces(MAX_RUNS, MAX_OWNED)
        self.withdrawals = set[asyncio.Task[None]]()
        self._format = format_
        self._opened = opened
        self._logs = logs
        self._runner = runner
        self._clock = clock

    async def begin(self, asked: ClientRequest, new: NewRun) -> RunRequest:
        """Raises GatewayError 413, 429, 503."""
        account = asked.lease.account
        client = account.client
        if not self.places.admit(new.owner, client):
            raise self._full(new.owner)
        key, events, lease = (new.owner, f"resp_{uuid4().hex}"), account.lease(), account.lease()
        try:
            api = await new.request(lease)
            run = await self._queued(key, client, new, (events, lease))
        except BaseException as error:
            events.close()
            lease.close()
            if isinstance(error, asyncio.CancelledError):
                self._withdraw(key, client)
            else:
                self.places.release(new.owner, client)
            raise
        return RunRequest(asked, run, api, lease)

    async def _queued(self, key: Key, client: str, new: NewRun, leases: tuple[MemoryLease, MemoryLease]) -> Run:
        """leases: of its events, of its body."""
        events, lease = leases
        now = self._clock()
        response = new.queued(key[1], int(now))
        charge(lease, len(response))
        stored = StoredResponse(
            owner=key[0],
            id=key[1],
            parent=new.previous,
            conversation=new.conversation,
            created_at=now,
            status=QUEUED,
            input=new.input,
            output=b"",
            response=response,
        )
        try:
            await (await self._opened()).begin(stored, self._runner)
        except StoreFailed as failure:
            raise unavailable(failure) from None
        run = Run(stored, client, self._format, self._opened, self._logs, events)
        run.say("created")
        run.say(QUEUED)
        return run

    def _withdraw(self, key: Key, client: str) -> None:
        async def work() -> None:
            try:
                with contextlib.suppress(StoreError):
                    await (await self._opened()).delete(*key)
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


def charge(lease: MemoryLease, size: int) -> None:
    """Raises GatewayError 413 or 503."""
    if not lease.grow(size):
        raise over_budget(0, lease.account.largest, size)
