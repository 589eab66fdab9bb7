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
from gateway.budget import LARGE_BODY
from gateway.drain import Drain
from gateway.errors import GatewayError, internal_error, shutting_down
from gateway.exchange import Request, keep_prompt
from gateway.metrics import Metrics
from gateway.proxy import Proxy
from gateway.record import CLIENT_LEFT, Record, begin
from gateway.reply import Reply
from gateway.request_log import RequestLog

log = logging.getLogger("warmroute.gateway")


@dataclass(slots=True, eq=False)
class Entry:
    """The handler of everything that goes to a replica. body_s: how long a request's body may take to arrive."""

    body_s: float
    proxy: Proxy
    metrics: Metrics
    drain: Drain
    requests: RequestLog
    clock: Callable[[], float]

    async def handle(self, request: Request) -> Any:
        """Returns a `Reply`, which is no `web.StreamResponse`, but does for aiohttp (see there)."""
        record = begin(request, self.clock())
        task = self.drain.enter()
        try:
            api = self._parse(request, request.take(), record) if body_here(request) else await self._read(request, record)
            return await self.proxy.forward(request, api, record)
        except GatewayError as error:
            return self._failed(request, record, error)
        except (asyncio.CancelledError, ConnectionError):
            if self.drain.over:
                return self._failed(request, record, shutting_down())
            if not record.told:
                record.status, record.error = CLIENT_LEFT, record.error or "the client left"
            raise
        except Exception:  # the last border: a bug must not cost more than its own request
            log.exception("unhandled error", extra={"path": request.path, "id": record.id})
            return self._failed(request, record, internal_error())
        finally:
            record.finish(self.metrics, self.requests, self.clock())
            self.drain.leave(task)
            del task  # else a cancelled task, its error and this frame are a cycle, and the request stays in memory with it

    async def _read(self, request: Request, record: Record) -> openai.ApiRequest:
        """The request, once its body is here. Nobody but the result refers to the body then: it decides how long it is held."""
        raw = await read_body(request, self.body_s, opaque=openai.kind_of(record.path) == openai.OTHER)
        record.begun = self.clock()  # an upload takes its time; what counts is ours
        return self._parse(request, raw, record)

    def _parse(self, request: Request, raw: bytes, record: Record) -> openai.ApiRequest:
        kind = openai.kind_of(record.path)
        if kind != openai.OTHER and request.method != "POST":
            raise GatewayError(405, "method_not_allowed", f"{record.path} takes POST.")
        if len(raw) >= LARGE_BODY:
            with parsing(lease_of(request), len(raw)):
                api = _understand(kind, raw)
            keep_prompt(request, api)
        else:
            api = _understand(kind, raw)
        record.stream = api.stream
        return api

    def _failed(self, request: Request, record: Record, error: GatewayError) -> Reply:
        record.status, record.error = error.status, error.message
        # While we go down the client's next request is to go to somebody who stays; and no request follows half of one.
        keep_alive = complete(request) and not self.drain.draining
        reply = Reply(request, keep_alive=keep_alive, patience_s=self.proxy.answers.patience_s)
        body = openai.error_body(error)
        further = "".join(f"{name}: {value}\r\n" for name, value in _headers(error, record.id))
        headers = b"Content-Type: application/json\r\n" + further.encode("ascii")
        reply.begin(error.status, headers, length=len(body), first=body)
        return reply


def _understand(kind: str, raw: bytes) -> openai.ApiRequest:
    return openai.parse_other(raw) if kind == openai.OTHER else openai.parse(kind, raw)


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
