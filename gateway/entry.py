"""Where a request comes in: it is read and parsed, forwarded, and whatever became of it counted and logged once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

from aiohttp import web

from gateway.api import openai
from gateway.body import read_body
from gateway.drain import Drain
from gateway.errors import GatewayError, internal_error, shutting_down
from gateway.logs import RequestLog
from gateway.metrics import Metrics
from gateway.proxy import Proxy
from gateway.record import CLIENT_LEFT, Record, begin
from gateway.reply import Reply

log = logging.getLogger("warmroute.gateway")


@dataclass(slots=True, eq=False)
class Entry:
    """The handler of everything that goes to a replica."""

    proxy: Proxy
    metrics: Metrics
    drain: Drain
    requests: RequestLog
    clock: Callable[[], float]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """A `Reply` is none, but does for aiohttp (see there)."""
        record = begin(request, self.clock())
        task = self.drain.enter()
        try:
            raw = await read_body(request)
            record.begun = self.clock()  # an upload takes its time; what counts is ours
            return cast(web.StreamResponse, await self._answer(request, raw, record))
        except GatewayError as error:
            return self._failed(record, error)
        except (asyncio.CancelledError, ConnectionError):
            if self.drain.over:
                return self._failed(record, shutting_down())
            if not record.told:
                record.status, record.error = CLIENT_LEFT, record.error or "the client left"
            raise
        except Exception:  # the last border: a bug must not cost more than its own request
            log.exception("unhandled error", extra={"path": request.path, "id": record.id})
            return self._failed(record, internal_error())
        finally:
            record.finish(self.metrics, self.requests, self.clock())
            self.drain.leave(task)

    async def _answer(self, request: web.Request, raw: bytes, record: Record) -> Reply:
        kind = openai.kind_of(record.path)
        if kind != openai.OTHER and request.method != "POST":
            raise GatewayError(405, "method_not_allowed", f"{record.path} takes POST.")
        api = openai.parse_other(raw) if kind == openai.OTHER else openai.parse(kind, raw)
        record.stream = api.stream
        return await self.proxy.forward(request, api, record)

    def _failed(self, record: Record, error: GatewayError) -> web.Response:
        record.status, record.error = error.status, error.message
        answer = error_response(error, record.id)
        if self.drain.draining:
            answer.force_close()  # so that the client's next request goes to somebody who stays
        return answer


def error_response(error: GatewayError, request_id: str | None = None) -> web.Response:
    """An error in OpenAI's shape."""
    headers = {"Server": "warmroute"}
    if request_id:
        headers["X-Request-Id"] = request_id
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return web.Response(status=error.status, body=openai.error_body(error), content_type="application/json", headers=headers)


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
