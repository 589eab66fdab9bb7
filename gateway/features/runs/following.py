"""Clients that follow a run: events as they come, from any number on, to the end.

    its log is here ──────────────► what it holds, then what comes
    it runs in another process ───► nothing until its end is in the store; then the last event
    it has ended, its log is gone ► a stream that is made of the kept object

A client that does not read is waited for; what its run's log drops meanwhile it does not get: its stream ends with an error,
and it may fetch the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.database.failures import StoreError, StoreFailed
from gateway.errors import ClientStalled, GatewayError, bad_request
from gateway.features.histories.histories import unavailable
from gateway.features.histories.records import Charge
from gateway.features.runs.event_log import EventLog
from gateway.features.runs.runs import Runs
from gateway.request.client import ClientReply
from gateway.request.running import RunningRequests
from gateway.upstream.client import PausableSource

FIRST: Final = -1  # the number before the first one
PARSED: Final = 4  # memory of a parsed JSON text, as a multiple of its length

ErrorEvent = Callable[[GatewayError], bytes]


class Gate(PausableSource):
    """Open while the client keeps up."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def passed(self, patience_s: float) -> None:
        """Raises ClientStalled."""
        if self._open.is_set():
            await asyncio.sleep(0)  # others have their turn
            return
        try:
            async with asyncio.timeout(patience_s):
                await self._open.wait()
        except TimeoutError:
            raise ClientStalled(f"the client has not read for {patience_s:g} s") from None


class RunStreamRequest(NamedTuple):
    """A client's request for the stream of a run. response: the stored object. going: it is still running. after: number of the
    last event that the client has; None: it has none.
    """

    owner: str
    id: str
    response: bytes
    going: bool
    after: int | None


class FollowerStream(NamedTuple):
    """A stream for one client. log: of the run, None: it is not here. again: what is in the store, None: it has just begun.
    client: its address.
    """

    log: EventLog | None
    again: RunStreamRequest | None
    after: int | None
    client: str = ""


class Followers:
    """See the top of this file."""

    def __init__(self, runs: Runs, running: RunningRequests) -> None:
        self._runs = runs
        self._running = running

    def find(self, again: RunStreamRequest, client: str) -> FollowerStream:
        """client: the address that follows. Raises GatewayError 400 if these events are not to be had."""
        log = self._runs.logs.find((again.owner, again.id))
        after = FIRST if again.after is None else again.after
        if log and after >= log.next:
            raise bad_request(f"The newest event of this response is number {log.next - 1}.", "starting_after")
        if log and log.first <= after + 1:
            return FollowerStream(log, None, after, client)
        if log and not log.ended:
            text = f"Of the events of this response those before number {log.first} are held no more."
            raise bad_request(f"{text} Ask for later ones, or fetch the response when it is complete.", "starting_after")
        return FollowerStream(None, again, again.after, client)

    async def send(
        self, following: FollowerStream, reply: ClientReply, failed: ErrorEvent, charge: Charge, patience_s: float
    ) -> None:
        """All of it to a reply that has begun, which ends. failed: the event for an error. charge: memory that it takes.

        Raises ConnectionError if the client has left, or does not read.
        """
        gate = Gate()
        reply.feed_from(gate)
        try:
            if following.log:
                await self._follow(
                    following.log, FIRST if following.after is None else following.after, reply, gate, patience_s
                )
            elif following.again:
                await self._replay(following.again, following.client, reply, gate, charge, patience_s)
            reply.end()
        except ClientStalled:
            reply.cut()
            raise
        except GatewayError as error:
            reply.end(failed(error))
        except asyncio.CancelledError:
            if not self._running.over:
                raise  # the client left
            reply.end(failed(_going_down(here=following.log is not None)))
        finally:
            reply.feed_from(None)

    async def _follow(self, log: EventLog, after: int, reply: ClientReply, gate: Gate, patience_s: float) -> None:
        while True:
            await gate.passed(patience_s)
            found = log.since(after)
            if found is None:
                raise GatewayError(410, "events_gone", "The client was too slow: events that it needs are held no more.")
            data, last = found
            if data:
                reply.write(data)
                after = last
            elif log.ended:
                return
            else:
                await log.changed()

    async def _replay(
        self, again: RunStreamRequest, client: str, reply: ClientReply, gate: Gate, charge: Charge, patience_s: float
    ) -> None:
        response = again.response
        if again.going:
            await self._runs.over((again.owner, again.id), client)
            try:
                response = (await (await self._runs.opened()).get(again.owner, again.id)).response
            except StoreFailed as failure:
                raise unavailable(failure) from None
            except StoreError:
                raise GatewayError(404, "not_found", "The response was deleted.") from None
        charge(PARSED * len(response))
        for event in self._runs.format.replayed(response, again.after):
            await gate.passed(patience_s)
            reply.write(event)


def _going_down(*, here: bool) -> GatewayError:
    """The stream's end when this gateway goes down. here: it is this process that runs the response."""
    if here:
        text = "The gateway is shutting down, and a response that was not complete has failed with it: fetch it to see."
    else:
        text = "The gateway is shutting down. Follow the response again, or fetch it."
    return GatewayError(503, "shutting_down", text)
