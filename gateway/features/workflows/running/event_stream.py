"""Events of a run as server-sent events: a run never waits for its client, whose unread events are held in a bounded log.

The log of a client with a connection of its own has room for all values of a run, as outputs and once more in its last event: a
run may have them all before its client can read one. They are charged to the client's share of memory, and are dropped as soon
as they are sent.
"""

from __future__ import annotations

import asyncio
from typing import Final

import orjson

from gateway.errors import ClientStalled, GatewayError
from gateway.features.runs.event_log import MAX_LOG, EventLog, Logs
from gateway.features.runs.following import FIRST, Gate
from gateway.features.workflows.running.messages import RunEvent
from gateway.features.workflows.running.step_ends import MAX_RUN_BYTES
from gateway.request.client import ClientReply

KEEP_ALIVE_S: Final = 10.0
COMMENT: Final = b": the run goes on\n\n"
MAX_UNREAD: Final = MAX_LOG + 2 * MAX_RUN_BYTES  # bytes of events
_ALL_CLIENTS: Final = 1 << 40  # bytes; each client has its share of memory


def event_bytes(run: str, number: int, event: RunEvent) -> bytes:
    data = orjson.dumps({"run": run, "seq": number, **event.data})
    return b"event: %b\nid: %d\ndata: %b\n\n" % (event.kind.encode(), number, data)


def error_event(run: str, number: int, error: GatewayError) -> bytes:
    """The last event of a stream that ends before its run. number: after the last event that the client has."""
    return event_bytes(run, number, RunEvent("error", {"error": {"code": error.code, "message": error.message}}))


def unread_logs() -> Logs:
    """Logs of runs whose only reader is the client of their connection."""
    return Logs(max_log=MAX_UNREAD, max_logs=_ALL_CLIENTS)


class EventSender:
    """Sends the events of a log to a client. sent: number of the last event that the client has. logs: the logs with the log,
    from which sent events are removed; None: other clients read it, too.
    """

    def __init__(self, log: EventLog, reply: ClientReply, sent: int = FIRST, logs: Logs | None = None) -> None:
        self._log, self._logs = log, logs
        self._reply = reply
        self.sent = sent

    async def run(self, patience_s: float) -> None:
        """Until the log has ended, and all its events are sent.

        Raises ConnectionError if the client has left, or does not read; GatewayError 410 if its next events have been dropped.
        """
        log, reply = self._log, self._reply
        gate = Gate()
        reply.feed_from(gate)
        try:
            while True:
                await gate.wait_open(patience_s)
                found = log.since(self.sent)
                if found is None:
                    raise GatewayError(410, "events_gone", "The client was too slow: its next events have been dropped.")
                data, self.sent = found
                if data:
                    reply.write(data)
                    if self._logs is not None:
                        self._logs.sent(log, self.sent)
                elif log.ended:
                    return
                else:
                    await self._next()
        except ClientStalled:
            reply.cut()
            raise
        finally:
            reply.feed_from(None)

    async def _next(self) -> None:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._log.changed()
        except TimeoutError:
            self._reply.write(COMMENT)
