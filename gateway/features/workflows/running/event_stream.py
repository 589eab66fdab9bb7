"""Events of a run as server-sent events: a run never waits for its client, whose unread events are held in a bounded log.

The log of a client with a connection of its own has room for all values of a run, as outputs and once more in its last event: a
run may have them all before its client can read one. They are charged to the client's share of memory, and are dropped as soon
as they are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import orjson

from gateway.errors import ClientStalled, GatewayError
from gateway.features.runs.event_log import MAX_LOG, EventLog, Logs
from gateway.features.runs.passing import FIRST, Gate, PulsedReply, pass_events
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
    from which sent events are removed; None: other clients read it, too. every_s: seconds without an event before a sign of
    life; 0: none. pulse: makes one.
    """

    def __init__(
        self,
        log: EventLog,
        reply: ClientReply,
        sent: int = FIRST,
        logs: Logs | None = None,
        every_s: float = KEEP_ALIVE_S,
        pulse: Callable[[], bytes] = lambda: COMMENT,
    ) -> None:
        self._log, self._logs = log, logs
        self._every_s, self._pulse = every_s, pulse
        self._reply = reply
        self.sent = sent

    async def run(self, patience_s: float) -> None:
        """Until the log has ended, and all its events are sent.

        Raises ConnectionError if the client has left, or does not read; GatewayError 410 if its next events have been dropped.
        """
        log, reply, gate = self._log, self._reply, Gate()
        pulsed = PulsedReply(reply, self._every_s, self._pulse)

        def write(data: bytes, last: int) -> None:
            self.sent = last
            pulsed.write(data)
            if self._logs is not None:
                self._logs.sent(log, last)

        reply.feed_from(gate)
        try:
            await pass_events(log, self.sent, write, gate, patience_s)
        except ClientStalled:
            reply.cut()
            raise
        finally:
            pulsed.close()
            reply.feed_from(None)
