"""The start of a run: it takes a place, memory for its body and its events, and is stored as queued.

    the client stays ──► it gets the id of the run                        an error ──► place and memory are released
    the client leaves during the write ──► nobody knows the id: the response is deleted after the write

The place of a withdrawn run is released when its response is deleted, so that leaving early gives a client no additional
places.
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
from gateway.errors import GatewayError
from gateway.features.histories.histories import full, unavailable
from gateway.features.histories.records import QUEUED, StoredResponse, StoreFullError
from gateway.features.runs.event_log import Key, Logs
from gateway.features.runs.places import RunPlaces
from gateway.features.runs.run import Run
from gateway.features.runs.run_format import RunFormat
from gateway.features.runs.run_request import RunRequest
from gateway.request.client import ClientRequest

if TYPE_CHECKING:
    from gateway.features.runs.run import OpenStore

MAX_RUNS: Final = 1000
MAX_OWNED: Final = 200
FULL_RETRY_S: Final = 5


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to start. owner, previous, conversation, input: for its StoredResponse. queued: makes its object from an id and a
    time. request: makes its request, and charges the body to the lease.
    """

    owner: str
    previous: str
    conversation: str
    input: bytes
    queued: Callable[[str, int], bytes]
    request: Callable[[MemoryLease], Awaitable[ApiRequest]]


class RunStarter:
    """Starts runs. places: of all runs. withdrawals: deletions in progress. clock: Unix seconds."""

    def __init__(self, format_: RunFormat, open_store: OpenStore, logs: Logs, runner: str, clock: Callable[[], float]) -> None:
        self.places = RunPlaces(MAX_RUNS, MAX_OWNED)
        self.withdrawals = set[asyncio.Task[None]]()
        self._format = format_
        self._open_store = open_store
        self._logs = logs
        self._runner = runner
        self._clock = clock

    async def begin(self, origin: ClientRequest, new: NewRun) -> RunRequest:
        """Stores the run as queued and returns its request. origin: the request of the client. Raises GatewayError 413, 429,
        503.
        """
        account = origin.lease.account
        client = account.client
        if not self.places.admit(new.owner, client):
            raise places_full(self.places, new.owner)
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
        return RunRequest(origin, run, api, lease)

    async def _queued(self, key: Key, client: str, new: NewRun, leases: tuple[MemoryLease, MemoryLease]) -> Run:
        """leases: for the events and for the body."""
        events, lease = leases
        now = self._clock()
        response = new.queued(key[1], int(now))
        lease.charge(len(response))
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
            await (await self._open_store()).begin(stored, self._runner)
        except StoreFullError as failure:
            raise full(failure) from None
        except StoreFailed as failure:
            raise unavailable(failure) from None
        run = Run(stored, client, self._format, self._open_store, self._logs, events)
        run.add_event("created")
        run.add_event(QUEUED)
        return run

    def _withdraw(self, key: Key, client: str) -> None:
        async def work() -> None:
            try:
                with contextlib.suppress(StoreError):
                    await (await self._open_store()).delete(*key)
            finally:
                self.places.release(key[0], client)

        task = asyncio.get_running_loop().create_task(work(), name="withdraw a run")
        self.withdrawals.add(task)
        task.add_done_callback(self.withdrawals.discard)


def places_full(places: RunPlaces, owner: str) -> GatewayError:
    """The error for an owner, or an address, without a free place."""
    if places.is_full(owner):
        reason = f"You have {MAX_OWNED} responses running in the background, which is the maximum."
    else:
        reason = f"Your address has its share of the {MAX_RUNS} background responses possible here, or all are running."
    text = f"{reason} Wait until one has ended, or cancel one."
    return GatewayError(429, "too_many_background_responses", text, retry_after_s=FULL_RETRY_S)
