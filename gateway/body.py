"""Reading a request's body: whole, within its limits, or an error that says what to do."""

from __future__ import annotations

import asyncio

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.errors import GatewayError, bad_request

ARRIVAL_S = 300.0  # a body that takes longer is given up


async def read_body(request: web.Request) -> bytes:
    """The body, decompressed. Raises GatewayError 400 (its encoding is broken), 408 or 413."""
    try:
        content = request.content
        if content.is_eof() and not content.exception():  # it is here already, as most are: no need to wait
            body = content.read_nowait()
            if len(body) > request.client_max_size:
                raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
            return body
        async with asyncio.timeout(ARRIVAL_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        text = f"The body is larger than {request.client_max_size >> 20} MiB (limits.body_mb). Send less, or raise the limit."
        raise GatewayError(413, "request_too_large", text) from error
    except TimeoutError as late:
        raise GatewayError(408, "request_timeout", f"The body did not arrive within {ARRIVAL_S:g} s.") from late
    except (web.RequestPayloadError, HttpProcessingError, ClientPayloadError) as broken:
        raise bad_request("The body cannot be read: its encoding is broken.", code="invalid_body") from broken
