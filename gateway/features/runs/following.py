"""Streams of a run for its followers: all events from a given number on, until the end.

    the log is in this process ───► the held events, then new ones
    it runs in another process ───► nothing until its end is stored; then the last event
    it has ended, without a log ──► a stream made from the stored object

The stream waits for a slow client, but the log does not. If the log drops events that the client has not received, its stream
ends with an error, and it may fetch the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.config.live import Live
from gateway.database.failures import StoreError, StoreFailed
from gateway.errors import ClientStalled, GatewayError, bad_request
from gateway.features.histories.histories import unavailable
from gateway.features.histories.records import Charge
from gateway.features.runs.event_log import EventLog
from gateway.features.runs.passing import FIRST, Gate, PulsedReply, pass_events
from gateway.features.runs.runs import Runs
from gateway.request.client import ClientReply
from gateway.request.running import RunningRequests

PARSED: Final = 4  # memory of a parsed JSON text, as a multiple of its length

ErrorEvent = Callable[[GatewayError], bytes]


class RunStreamRequest(NamedTuple):
    """A client's request for the stream of a run. response: the stored object. running: the run has not ended. after: number of
    the last event that the client has; None: none.
    """

    owner: str
    id: str
    response: bytes
    running: bool
    after: int | None


class FollowerStream(NamedTuple):
    """A stream for one client. log: of the run; None: not in this process. request: None: the run has just started. client: its
    address.
    """

    log: EventLog | None
    request: RunStreamRequest | None
    after: int | None
    client: str = ""


class Followers:
    """Finds and sends the streams of followers."""

    def __init__(self, runs: Runs, running: RunningRequests) -> None:
        self._runs = runs
        self._running = running

    def find(self, request: RunStreamRequest, client: str) -> FollowerStream:
        """The stream for this request. client: the address of the follower. Raises GatewayError 400 if the requested events are
        not available.
        """
        log = self._runs.logs.find((request.owner, request.id))
        after = FIRST if request.after is None else request.after
        if log and after >= log.next:
            raise bad_request(f"The latest event of this response is number {log.next - 1}.", "starting_after")
        if log and log.first <= after + 1:
            return FollowerStream(log, None, after, client)
        if log and not log.ended:
            text = f"The events of this response before number {log.first} have been dropped."
            raise bad_request(f"{text} Ask for later ones, or fetch the response when it is complete.", "starting_after")
        return FollowerStream(None, request, request.after, client)

    async def send(
        self,
        following: FollowerStream,
        reply: ClientReply,
        failed: ErrorEvent,
        charge: Charge,
        live: Live,
        pulse: Callable[[], bytes],
    ) -> None:
        """Sends the stream to a reply that has begun, and ends it. failed: makes the event for an error. charge: called with
        the memory that is needed. pulse: makes a sign of life.

        Raises ConnectionError if the client has left, or does not read.
        """
        gate, patience_s, pulsed = Gate(), live.patience_s, PulsedReply(reply, live.keepalive_s, pulse)
        reply.feed_from(gate)
        try:
            if following.log:
                begin = FIRST if following.after is None else following.after
                await pass_events(following.log, begin, lambda data, _: pulsed.write(data), gate, patience_s)
            elif following.request:
                await self._replay(following.request, following.client, pulsed, gate, charge, patience_s)
            reply.end()
        except ClientStalled:
            reply.cut()
            raise
        except GatewayError as error:
            reply.end(failed(error))
        except asyncio.CancelledError:
            if not self._running.over:
                raise  # the client left
            reply.end(failed(_shutdown_error(here=following.log is not None)))
        finally:
            pulsed.close()
            reply.feed_from(None)

    async def _replay(
        self, request: RunStreamRequest, client: str, reply: PulsedReply, gate: Gate, charge: Charge, patience_s: float
    ) -> None:
        response = request.response
        if request.running:
            await self._runs.wait_for_end((request.owner, request.id), client)
            try:
                response = (await (await self._runs.open_store()).get(request.owner, request.id)).response
            except StoreFailed as failure:
                raise unavailable(failure) from None
            except StoreError:
                raise GatewayError(404, "not_found", "The response was deleted.") from None
        charge(PARSED * len(response))
        for event in self._runs.format.replayed(response, request.after):
            await gate.wait_open(patience_s)
            reply.write(event)


def _shutdown_error(*, here: bool) -> GatewayError:
    """The error at the end of a stream when this gateway shuts down. here: this process runs the response."""
    if here:
        text = "The gateway is shutting down. If the response was not complete, it has failed: fetch it to see."
    else:
        text = "The gateway is shutting down. Follow the response again, or fetch it."
    return GatewayError(503, "shutting_down", text)
