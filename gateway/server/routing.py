"""The gateway's own endpoints: the choice of a handler, and its response.

request ──► Routes: the first with its path and method ──► handler ──► Response, or a reply that it has begun itself
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.dialects.openai.errors import error_body
from gateway.errors import CLIENT_LEFT, GatewayError, internal_error
from gateway.request.client import ClientReply
from gateway.server.http.request import HttpRequest

log = logging.getLogger("warmroute.gateway")

JSON: Final = "application/json"
PARAMETER: Final = re.compile(r"\{([a-z_]+)(?::([^}]+))?\}")  # of a path


@dataclass(slots=True)
class Response:
    """A whole answer. headers: in addition to the common ones."""

    body: bytes = b""
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[HttpRequest], Awaitable[Response | ClientReply]]
Writer = Callable[[HttpRequest, Response], ClientReply]


@dataclass(frozen=True, slots=True)
class Route:
    """methods: (): all. path: with parameters, {name} for one segment or {name:PATTERN}."""

    methods: tuple[str, ...]
    path: str
    handler: Handler


def get(path: str, handler: Handler, *, head: bool = True) -> Route:
    """A route for GET. head: and for HEAD."""
    return Route(("GET", "HEAD") if head else ("GET",), path, handler)


def post(path: str, handler: Handler) -> Route:
    return Route(("POST",), path, handler)


def delete(path: str, handler: Handler) -> Route:
    return Route(("DELETE",), path, handler)


def any_method(path: str, handler: Handler) -> Route:
    return Route((), path, handler)


def _ignored(_request: HttpRequest, _status: int) -> None:
    """A port without operators has no actions."""


class Routes:
    """The endpoints of one port. nothing_at: makes the error for a path without an endpoint. acted: called with each answer
    of an operator endpoint that may have changed something, and its status.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        write: Writer,
        nothing_at: Callable[[str], GatewayError],
        acted: Callable[[HttpRequest, int], None] = _ignored,
    ) -> None:
        self._write = write
        self._acted = acted
        self._nothing_at = nothing_at
        self._routes = [(re.compile(_pattern(route.path)), route) for route in routes]

    async def serve(self, request: HttpRequest) -> ClientReply:
        """Answer a request. Raises ConnectionError if the client has disconnected; other errors are answers in OpenAI's
        format.
        """
        status = CLIENT_LEFT
        try:
            answer = await self._answer(request)
            status = answer.status if isinstance(answer, Response) else 200
        finally:
            if request.action is not None:
                self._acted(request, status)
        return self._write(request, answer) if isinstance(answer, Response) else answer

    async def _answer(self, request: HttpRequest) -> Response | ClientReply:
        """Raises ConnectionError."""
        try:
            return await self._handler(request)(request)
        except GatewayError as error:
            return error_response(error)
        except ConnectionError:
            raise
        except Exception:  # outermost handler: a bug fails its own request only
            log.exception("unhandled error", extra={"path": request.path})
            return error_response(internal_error())

    def _handler(self, request: HttpRequest) -> Handler:
        """The handler of a request; it answers 405 if the path takes other methods. O(routes). Raises GatewayError 404."""
        allowed = set[str]()
        for pattern, route in self._routes:
            if found := pattern.fullmatch(request.path):
                if not route.methods or request.method in route.methods:
                    request.parameters = found.groupdict()
                    return route.handler
                allowed.update(route.methods)
        if allowed:
            return _refusal(", ".join(sorted(allowed)))
        raise self._nothing_at(request.path)


def _pattern(path: str) -> str:
    """A path with parameters as a regular expression."""
    parts, at = list[str](), 0
    for found in PARAMETER.finditer(path):
        parts += [re.escape(path[at : found.start()]), f"(?P<{found[1]}>{found[2] or '[^/]+'})"]
        at = found.end()
    return "".join([*parts, re.escape(path[at:])])


def _refusal(methods: str) -> Handler:
    """The handler of a path that takes other methods."""

    async def refuse(request: HttpRequest) -> Response:
        error = GatewayError(405, "method_not_allowed", f"{request.path} takes {methods}.")
        return Response(error_body(error), error.status, headers={"Allow": methods})

    return refuse


def error_response(error: GatewayError) -> Response:
    return Response(error_body(error), error.status, headers=error.retry_headers)
