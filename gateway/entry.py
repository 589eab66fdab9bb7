"""Where a request comes in: it is read and parsed, forwarded, and whatever became of it counted and logged once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web

from gateway.api import openai
from gateway.body import body_here, complete, lease_of, parsing, read_body
from gateway.drain import Drain
from gateway.errors import GatewayError, internal_error, shutting_down
from gateway.exchange import Request
from gateway.loops import VIA_HEADER, LoopGuard
from gateway.parser.parsing import Parsing
from gateway.proxy import Proxy
from gateway.record import CLIENT_LEFT, Record, begin
from gateway.reply import Reply
from gateway.request_log import RequestLog

log = logging.getLogger("warmroute.gateway")


@dataclass(slots=True, eq=False)
class Entry:
    """The handler of everything that goes to a replica. body_s: how long a request's body may take to arrive."""

    body_s: float
    parsing: Parsing
    proxy: Proxy
    drain: Drain
    requests: RequestLog
    loops: LoopGuard
    clock: Callable[[], float]

    async def handle(self, request: Request) -> Any:
        """Returns a `Reply`, which is no `web.StreamResponse`, but does for aiohttp (see there)."""
        record = begin(request, self.clock())
        task = self.drain.enter()
        api: openai.ApiRequest | None = None
        try:
            self.loops.require_no_loop(request.headers.get(VIA_HEADER))
            kind = _kind_of(request, record)
            raw = request.take() if body_here(request) else await self._read(request, record, kind)
            now = self.parsing.turns.free
            api = self.parsing.at_once(kind, raw) if now else await self.parsing.in_turn(kind, raw)
            if api is None:
                with parsing(lease_of(request), len(raw)):
                    scope, client = self.proxy.scope(request.headers), lease_of(request).account.client
                    api = await self.parsing.parse(kind, raw, scope, client)
            del raw  # from here on the request decides how long its body is held
            record.stream = api.stream
            return await self.proxy.forward(request, api, record)
        except GatewayError as error:
            return self._failed(request, record, error)
        except (asyncio.CancelledError, ConnectionError) as left:
            if self.drain.over:
                return self._failed(request, record, shutting_down())
            if not record.told:
                record.status, record.error = CLIENT_LEFT, record.error or str(left) or "the client left"
            raise
        except Exception:  # the last border: a bug must not cost more than its own request
            log.exception("unhandled error", extra={"path": request.path, "id": record.id})
            return self._failed(request, record, internal_error())
        finally:
            if api is not None:
                api.drop()
            record.finish(self.proxy.metrics, self.requests, self.clock())
            self.drain.leave(task)
            del task  # else a cancelled task, its error and this frame are a cycle, and the request stays in memory with it

    async def _read(self, request: Request, record: Record, kind: str) -> bytes:
        raw = await read_body(request, self.body_s, opaque=kind == openai.OTHER)
        record.begun = self.clock()  # an upload takes its time; what counts is ours
        return raw

    def _failed(self, request: Request, record: Record, error: GatewayError) -> Reply:
        record.status, record.error = error.status, error.message
        # While we go down the client's next request is to go to somebody who stays; and no request follows half of one.
        keep_alive = complete(request) and not self.drain.draining
        reply = Reply(request, keep_alive=keep_alive, patience_s=self.proxy.answers.patience_s)
        body = openai.error_body(error if self.proxy.answers.audience.is_operator(request) else error.redacted(record.id))
        further = "".join(f"{name}: {value}\r\n" for name, value in _headers(error, record.id))
        headers = b"Content-Type: application/json\r\n" + further.encode("ascii")
        reply.begin(error.status, headers, length=len(body), first=body)
        return reply


def _kind_of(request: Request, record: Record) -> str:
    """What the request's path asks for. Raises GatewayError 405."""
    if record.path == "/v1/models":  # the application answers GET and HEAD
        raise GatewayError(405, "method_not_allowed", f"{record.path} takes GET, HEAD.")
    kind = openai.kind_of(record.path)
    if kind != openai.OTHER and request.method != "POST":
        raise GatewayError(405, "method_not_allowed", f"{record.path} takes POST.")
    return kind


def error_response(error: GatewayError, request_id: str | None = None) -> web.Response:
    """An error in OpenAI's shape."""
    headers = {"Server": "warmroute", **dict(_headers(error, request_id))}
    return web.Response(status=error.status, body=openai.error_body(error), content_type="application/json", headers=headers)


def _headers(error: GatewayError, request_id: str | None) -> Iterator[tuple[str, str]]:
    if request_id:
        yield "X-Request-Id", request_id
    if error.retry_after_s is not None:
        yield "Retry-After", str(error.retry_after_s)


def raw_response(error: GatewayError) -> bytes:
    """An error as the bytes of a whole answer, after which the connection ends."""
    body = openai.error_body(error)
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if error.retry_after_s is not None:
        head.append(f"Retry-After: {error.retry_after_s}")
    return "\r\n".join((*head, "", "")).encode("ascii") + body
