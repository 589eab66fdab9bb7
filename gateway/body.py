"""Reading a request's body: whole, within its limits, or an error that says what to do."""

from __future__ import annotations

import asyncio

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.errors import GatewayError, bad_request
from gateway.plain import PlainRequest


def body_here(request: web.Request | PlainRequest) -> bytes | None:
    """The body of a plain request, if it is here already, as most are: no need to wait."""
    return request.body if isinstance(request, PlainRequest) else None


async def read_body(request: web.Request | PlainRequest, within_s: float) -> bytes:
    """The body, decompressed. Raises GatewayError 400 (its encoding is broken), 408 or 413."""
    try:
        async with asyncio.timeout(within_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        assert isinstance(request, web.Request)  # a plain one is not, if it is too large
        text = f"The body is larger than {request.client_max_size >> 20} MiB (limits.body_mb). Send less, or raise the limit."
        raise GatewayError(413, "request_too_large", text) from error
    except TimeoutError as late:
        text = f"The body did not arrive within {within_s:g} s (limits.body_s)."
        raise GatewayError(408, "request_timeout", text) from late
    except (web.RequestPayloadError, HttpProcessingError, ClientPayloadError) as broken:
        raise bad_request("The body cannot be read: its encoding is broken.", code="invalid_body") from broken
