"""Routes: which handler a request goes to, and what becomes of its answer and of its errors."""

from __future__ import annotations

import json

import aiohttp
import pytest

from gateway.errors import GatewayError
from gateway.request.client import ClientReply
from gateway.server.http.request import HttpRequest
from gateway.server.routing import Response, Routes, any_method, delete, get, post
from tests.gateway.servers import serving


async def shown(request: HttpRequest) -> Response:
    """The parameters of the path, and those of the query."""
    return Response(json.dumps([request.parameters, request.query]).encode())


async def other(_request: HttpRequest) -> Response:
    return Response(b"other", content_type="text/plain", headers={"X-A": "1"})


async def refuses(_request: HttpRequest) -> Response:
    raise GatewayError(409, "taken", "It is taken.", retry_after_s=7)


async def fails(_request: HttpRequest) -> Response:
    raise LookupError("a bug")


def write(request: HttpRequest, response: Response) -> ClientReply:
    reply = request.reply(keep_alive=True, patience_s=5)
    lines = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items()).encode()
    reply.begin(response.status, lines, length=len(response.body), first=response.body)
    return reply


ROUTES = Routes(
    [
        get("/a.b", other),
        get("/items/{id}", shown),
        post("/items/{id}", other),
        delete("/names/{name:.+}", shown),
        get("/stream", other, head=False),
        get("/refuses", refuses),
        get("/fails", fails),
        any_method("/v1/{path:.*}", shown),
        get("/v1/late", other),
    ],
    write,
    lambda path: GatewayError(404, "not_found", f"Nothing at {path}."),
)


@pytest.mark.parametrize(
    ("method", "path", "status", "wanted"),
    [
        ("GET", "/a.b", 200, b"other"),
        ("GET", "/axb", 404, b"Nothing at /axb."),
        ("GET", "/items/7?x=1&y=&x=2", 200, b'[{"id": "7"}, {"x": "1", "y": ""}]'),
        ("GET", "/items/%41%20b", 200, b'[{"id": "A b"}, {}]'),
        ("GET", "/items/7/8", 404, b"Nothing"),
        ("HEAD", "/items/7", 200, b""),
        ("POST", "/items/7", 200, b"other"),
        ("DELETE", "/items/7", 405, b"/items/7 takes GET, HEAD, POST."),
        ("DELETE", "/names/a/b", 200, b'[{"name": "a/b"}, {}]'),
        ("HEAD", "/stream", 405, b""),
        ("GET", "/refuses", 409, b"It is taken."),
        ("GET", "/fails", 500, b"internal_error"),
        ("PATCH", "/v1/late", 200, b'[{"path": "late"}, {}]'),
    ],
)
async def test_the_first_route_with_path_and_method_is_taken(method: str, path: str, status: int, wanted: bytes) -> None:
    async with (
        serving(ROUTES.serve) as (_, port),
        aiohttp.ClientSession() as session,
        session.request(method, f"http://127.0.0.1:{port}{path}") as answer,
    ):
        assert (answer.status, wanted in await answer.read()) == (status, True)
        assert answer.headers.get("Retry-After") == ("7" if status == 409 else None)
        if status == 405:
            assert answer.headers["Allow"] == ("GET" if path == "/stream" else "GET, HEAD, POST")
