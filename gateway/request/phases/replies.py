"""Answers by the gateway itself: errors, and stored objects. The only place where an error becomes an answer."""

from __future__ import annotations

from typing import Final

from gateway.admission.cors import answer_lines
from gateway.config.live import Live
from gateway.errors import GatewayError, internal_error
from gateway.request.client import Audience, ClientReply
from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest
from gateway.request.running import RunningRequests

JSON_LINE: Final = b"Content-Type: application/json\r\n"
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
TOO_MANY: Final = 429
STREAM_LINES: Final = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"


def queue_line(record: SettledRequest) -> bytes:
    """The header line with the time in queues of pools, if there was any."""
    queued_s = record.placement.queued_s
    return b"Server-Timing: queue;dur=%.1f\r\n" % (1000 * queued_s) if queued_s else b""


def end_with_error(exchange: Exchange, reply: ClientReply, error: GatewayError) -> None:
    """End a stream with an error event, or cut it where none can follow. error: as this client may read it."""
    reader = exchange.delivered.reader
    event = None if reader is not None and reader.within_event else exchange.dialect.error_event(error, reader)
    if event is None:
        reply.cut()
    else:
        reply.end(event)


class Replies:
    """Begins the gateway's own answers."""

    def __init__(self, live: Live, running: RunningRequests, audience: Audience) -> None:
        self._live = live
        self._running = running
        self._audience = audience

    def begin(self, exchange: Exchange, status: int, body: bytes | None, lines: bytes) -> ClientReply:
        """Send an answer's head, and its body. body: None if it comes later. lines: further lines of the head."""
        request, record = exchange.request, exchange.record
        # If this gateway goes down, the client's next request should reach another one; and no request can follow an incomplete
        # one.
        keep_alive = request.complete and not self._running.leaving
        size = None if body is None else len(body)
        reply = request.reply(keep_alive=keep_alive, patience_s=self._live.patience_s, size=size)
        headers = b"X-Request-Id: %b\r\n%b" % (record.id.encode("ascii"), lines)
        if self._live.cors_origins:
            headers += answer_lines(self._live.cors_origins, request.headers.get("Origin"))
        reply.begin(status, headers, length=size, first=body or b"")
        return reply

    def begin_early(self, exchange: Exchange) -> ClientReply:
        """Send the head of a stream before there is an answer. An error is then an event of the stream."""
        lines, id_header = STREAM_LINES, exchange.dialect.id_header
        if id_header:
            lines += b"%b: %b\r\n" % (id_header, exchange.record.id.encode("ascii"))
        reply = self.begin(exchange, 200, None, lines + exchange.head_lines)
        exchange.delivered.reply, exchange.delivered.early = reply, True
        return reply

    def refuse(self, exchange: Exchange, error: GatewayError, lines: bytes = b"") -> ClientReply:
        """The answer to a request that cannot be served: the only place where a request's error becomes an answer, or an event
        of a stream that has no answer.
        """
        record, dialect = exchange.record, exchange.dialect
        record.status, record.error, record.code = error.status, error.message, error.code
        shown, sent = self.shown(exchange, error), exchange.delivered.reply
        if sent is not None and exchange.delivered.early:
            end_with_error(exchange, sent, shown)
            return sent
        body = dialect.error_body(shown, record.id)
        lines = JSON_LINE + lines
        if dialect.id_header:
            lines += b"%b: %b\r\n" % (dialect.id_header, record.id.encode("ascii"))
        if error.status in (UNAUTHORIZED, FORBIDDEN) or (error.status == TOO_MANY and record.sender.key):
            record.sender.client = exchange.request.lease.account.client  # lets operators find clients that guess keys
        if error.status == UNAUTHORIZED:
            lines += b"WWW-Authenticate: Bearer\r\n"
        return self.begin(exchange, error.status, body, lines + queue_line(record) + error.retry_lines)

    def bug(self, exchange: Exchange) -> ClientReply:
        """The answer to a request that was ended by a bug."""
        delivered = exchange.delivered
        if (sent := delivered.reply) and sent.begun and not (delivered.early and delivered.reader is None):
            sent.cut()  # nothing valid can follow the bytes sent already
        return self.refuse(exchange, internal_error())

    def shown(self, exchange: Exchange, error: GatewayError) -> GatewayError:
        """The error with the details that this client may read."""
        return error if self._audience.is_operator(exchange.request) else error.redacted(exchange.record.id)
