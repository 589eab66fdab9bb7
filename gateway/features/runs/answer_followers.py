"""Detached answers for clients that follow them: the head, then the pieces from the beginning.

A follower that does not read pauses the replica (`DetachedAnswer.feed_from`), or the log drops pieces that the follower has not
received.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.core import Core
from gateway.dialects.excerpt import excerpt
from gateway.dialects.openai.stream import ChunkReader
from gateway.errors import ClientStalled, GatewayError, internal_error, shutting_down
from gateway.features.runs.detached_answer import DetachedAnswer, FollowerGate
from gateway.features.runs.passing import FIRST, pass_events
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.phases.replies import end_with_error

_OF_ONE_CLIENT: Final = (b"x-request-id:", b"access-control-", b"vary:")  # lines of a head
_OF_OPERATORS: Final = b"x-warmroute-"


class _FollowedStream:
    """Writes the pieces of a stream to one client. stripper: takes the usage out. whole: the client has no incomplete event."""

    def __init__(self, reply: ClientReply, stripper: ChunkReader | None) -> None:
        self.reply = reply
        self.whole = True
        self._stripper = stripper
        if stripper is not None:
            stripper.started = True  # else it would take out the event of an error before the first token

    def write(self, data: bytes, _last: int) -> None:
        out = self._stripper.feed(data) if self._stripper is not None else data
        if out:
            self.reply.write(out)
            self.whole = out.endswith((b"\n\n", b"\r\n\r\n"))


class AnswerFollowers:
    """Sends answers (see the module)."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def follow(self, exchange: Exchange, run: DetachedAnswer, *, strip_usage: bool) -> ClientReply:
        """The answer of a generation. strip_usage: without the usage of a chat's stream. Raises GatewayError."""
        await run.begun.wait()
        if not run.status:
            raise run.stopped.again() if run.stopped is not None else internal_error()
        record, lines = exchange.record, self._lines(exchange, run)
        record.status = run.status
        if not run.streams:
            return await self._whole(exchange, run, lines)
        record.subject.stream = True
        reply = begin_stream(self._core, exchange, run.status, lines)
        sent = _FollowedStream(reply, ChunkReader(strip_usage=True) if strip_usage else None)
        try:
            await self._send(run, reply, sent)
            record.answer.complete, record.answer.ok = run.complete, run.complete and not run.failed
            if run.failed:
                record.error = "the generation ended with an error"
        except ClientStalled:
            reply.cut()
            raise
        except GatewayError as error:
            self._break_off(exchange, sent, error)
        except asyncio.CancelledError:
            ended = exchange.ended_by.again() if exchange.ended_by is not None else None
            if ended is None and not self._core.running.over:
                raise  # the client left
            self._break_off(exchange, sent, ended or shutting_down())
        finally:
            reply.feed_from(None)
        return reply

    async def _send(self, run: DetachedAnswer, reply: ClientReply, sent: _FollowedStream) -> None:
        """Sends the pieces of a stream until it has ended. Raises GatewayError if it has no end for this client."""
        gate = FollowerGate(run)
        reply.feed_from(gate)
        try:
            await pass_events(run.log, FIRST, sent.write, gate, self._core.live.patience_s)
        finally:
            gate.resume()
        if run.complete:
            reply.end()
        elif run.stopped is not None:
            raise run.stopped.again()
        else:
            reply.cut()

    async def _whole(self, exchange: Exchange, run: DetachedAnswer, lines: bytes) -> ClientReply:
        """A plain answer, or an error. Raises GatewayError."""
        while not run.log.ended:
            await run.log.changed()
        if run.stopped is not None and not run.complete:
            raise run.stopped.again()
        if run.log.first:
            raise GatewayError(502, "answer_too_large", "The answer is too large to be held: ask for a shorter one.")
        if not run.complete:
            raise GatewayError(502, "replica_failed", "The replica failed while it answered. Send the request again.")
        pieces, sent = list[bytes](), FIRST
        while (found := run.log.since(sent)) and found[0]:
            pieces.append(found[0])
            sent = found[1]
        body = b"".join(pieces)
        record = exchange.record
        if run.status >= 400:
            record.error = excerpt(body) or f"the generation was answered with {run.status}"
        self._core.pulses.forget(exchange)
        early = exchange.delivered.reply if exchange.delivered.early else None
        if early is None:
            reply = self._core.replies.begin(exchange, run.status, body, lines)
        else:
            reply = early
            self._end(exchange, reply, run.status, body)
        record.answer.complete = True
        record.answer.ok = run.status < 400
        return reply

    def _end(self, exchange: Exchange, reply: ClientReply, status: int, body: bytes) -> None:
        """Ends a stream that pulses have begun, with an answer of another form. Raises GatewayError."""
        if status >= 400:
            end_with_error(exchange, reply, exchange.dialect.replica_error(status, body))
            return
        try:
            reply.end(exchange.dialect.streamed(exchange.api, body))
        except (TypeError, ValueError):  # TypeError: nested too deeply
            raise internal_error() from None

    def _break_off(self, exchange: Exchange, sent: _FollowedStream, error: GatewayError) -> None:
        exchange.record.error, exchange.record.code = error.message, error.code
        event = exchange.dialect.error_event(self._core.replies.shown(exchange, error), None) if sent.whole else None
        if event is None:
            sent.reply.cut()
        else:
            sent.reply.end(event)

    def _lines(self, exchange: Exchange, run: DetachedAnswer) -> bytes:
        """The lines of a generation's head for a client that follows it."""
        dropped = list(_OF_ONE_CLIENT)
        if exchange.dialect.id_header:
            dropped.append(exchange.dialect.id_header.lower() + b":")
        if not self._core.access.sees_headers(exchange.request):
            dropped.append(_OF_OPERATORS)
        kept = [line for line in run.lines.split(b"\r\n") if line and not line.lower().startswith(tuple(dropped))]
        return b"".join(line + b"\r\n" for line in kept) + id_lines(exchange)


def begin_stream(core: Core, exchange: Exchange, status: int, lines: bytes) -> ClientReply:
    """Sends the head of a stream, unless pulses have sent one. From then on only the generation has pulses."""
    core.pulses.forget(exchange)
    if exchange.delivered.early and exchange.delivered.reply is not None:
        return exchange.delivered.reply
    return core.replies.begin(exchange, status, None, lines)


def id_lines(exchange: Exchange) -> bytes:
    """The dialect's own line with the id of a request."""
    name = exchange.dialect.id_header
    return b"%b: %b\r\n" % (name, exchange.record.id.encode("ascii")) if name else b""
