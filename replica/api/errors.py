"""Errors become responses only here, each in the shape of the called API; and the request's name in them."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from replica.api.messages.errors import error_body
from replica.api.stream import client_error
from replica.api.validation import ApiError, shortened

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SERVED = "/v1/chat/completions, /v1/completions, /v1/messages, /v1/responses, /v1/models"
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_NAME = web.RequestKey("warmroute_name", str)


def name_of(http: web.Request) -> str:
    """The request's name: the client's X-Request-Id if it is safe, else a random one, the same at each call."""
    if _NAME not in http:
        sent = http.headers.get("X-Request-Id", "")
        http[_NAME] = sent if _SAFE_ID.fullmatch(sent) else secrets.token_hex(8)
    return http[_NAME]


def api_headers(http: web.Request) -> dict[str, str]:
    """The headers of every response of the called API."""
    return {"request-id": name_of(http)} if _is_anthropics(http) else {}


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors become responses. Between requests that come on one connection without a pause, others have their turn."""
    await asyncio.sleep(0)
    try:
        return await handler(request)
    except ApiError as error:
        return _response(request, error)
    except web.HTTPRequestEntityTooLarge:
        text = f"A body may have {request.client_max_size:,} bytes at most. Send a smaller body."
        return _response(request, ApiError(413, text, code="request_too_large"))
    except web.HTTPNotFound:
        return _response(request, ApiError(404, f"Unknown path {shortened(request.path)}: this replica serves {SERVED}."))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _response(request, ApiError(405, f"{request.method} is not allowed here: use {allowed}."))
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:  # noqa: BLE001 - any error: the client gets it in the API's format
        return _response(request, client_error(error))


def _is_anthropics(http: web.Request) -> bool:
    return http.path == "/v1/messages" or http.path.startswith("/v1/messages/")


def _response(http: web.Request, error: ApiError) -> web.Response:
    body = error_body(error, name_of(http)) if _is_anthropics(http) else error.body()
    headers = api_headers(http)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    data = orjson.dumps(body)
    return web.Response(body=data, status=error.status, content_type="application/json", headers=headers)
