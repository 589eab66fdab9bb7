"""Answers by the gateway itself: errors, and stored objects. The only place where an error becomes an answer."""

from __future__ import annotations

from typing import Final

from gateway.admission.cors import answer_lines
from gateway.config.live import Live
from gateway.errors import GatewayError, internal_error
from gateway.request.client import Audience, ClientReply
from gateway.request.exchange import Exchange
from gateway.request.running import RunningRequests

JSON_LINE: Final = b"Content-Type: application/json\r\n"
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
TOO_MANY: Final = 429
STREAM_LINES: Final = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"


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
        reply = request.reply(keep_alive=keep_alive, patience_s=self._live.patience_s)
        headers = b"X-Request-Id: %b\r\n%b" % (record.id.encode("ascii"), lines)
        if self._live.cors_origins:
            headers += answer_lines(self._live.cors_origins, request.headers.get("Origin"))
        reply.begin(status, headers, length=None if body is None else len(body), first=body or b"")
        return reply

    def refuse(self, exchange: Exchange, error: GatewayError, lines: bytes = b"") -> ClientReply:
        """The answer to a request that cannot be served: the only place where a request's error becomes an answer."""
        record, dialect = exchange.record, exchange.dialect
        record.status, record.error, record.code = error.status, error.message, error.code
        body = dialect.error_body(self.shown(exchange, error), record.id)
        lines = JSON_LINE + lines
        if dialect.id_header:
            lines += b"%b: %b\r\n" % (dialect.id_header, record.id.encode("ascii"))
        if error.status in (UNAUTHORIZED, FORBIDDEN) or (error.status == TOO_MANY and record.sender.key):
            record.sender.client = exchange.request.lease.account.client  # lets operators find clients that guess keys
        if error.status == UNAUTHORIZED:
            lines += b"WWW-Authenticate: Bearer\r\n"
        return self.begin(exchange, error.status, body, lines + error.retry_lines)

    def bug(self, exchange: Exchange) -> ClientReply:
        """The answer to a request that was ended by a bug."""
        if (sent := exchange.delivered.reply) and sent.begun:
            sent.cut()  # nothing valid can follow the bytes sent already
        return self.refuse(exchange, internal_error())

    def shown(self, exchange: Exchange, error: GatewayError) -> GatewayError:
        """The error with the details that this client may read."""
        return error if self._audience.is_operator(exchange.request) else error.redacted(exchange.record.id)
