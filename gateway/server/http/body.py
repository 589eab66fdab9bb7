"""Reads a request's body: whole, decompressed, within its limits.

A body is held once. Received bytes are charged to the request's lease where the connection is read (`plain_request.py`,
`bounded_parser.py`), decompressed bytes here. Between here and the replica only the upstream request refers to the bytes, so
that they can be dropped while the answer is streamed.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import Final

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDictProxy

from gateway.admission.memory import MemoryLease, holding, peak_of
from gateway.errors import GatewayError, bad_request, over_budget
from gateway.server.http.inflate import CODINGS, INFLATER_BYTES, Inflater
from gateway.turns import turns_of

UNKNOWN: Final = "unknown"


def coding_of(headers: CIMultiDictProxy[str]) -> str:
    """The content coding of a body: "" (none), one of CODINGS, or UNKNOWN."""
    text = ",".join(headers.getall("Content-Encoding", ())).strip().lower()
    if text in ("", "identity"):
        return ""
    return CODINGS.get(text, UNKNOWN)


async def read_body(
    request: web.Request, lease: MemoryLease, *, max_bytes: int, within_s: float, opaque: bool = False
) -> bytes:
    """The body, decompressed. opaque: a body in an unknown coding is returned unchanged.

    Raises GatewayError: 400 (broken coding), 408, 413, 415, 503 (no memory for it at present).
    """
    try:
        async with asyncio.timeout(within_s):
            return await _read(request, lease, max_bytes, opaque=opaque)
    except TimeoutError as late:
        raise too_slow(within_s) from late
    except (web.RequestPayloadError, HttpProcessingError, ClientPayloadError) as broken:
        raise bad_request("The body cannot be read: its encoding is broken.", code="invalid_body") from broken


async def _read(request: web.Request, lease: MemoryLease, limit: int, *, opaque: bool) -> bytes:
    coding = coding_of(request.headers)
    if coding == UNKNOWN and not opaque:
        raise GatewayError(415, "unsupported_encoding", "The body's Content-Encoding is not gzip, deflate or identity.")
    declared = request.content_length or 0
    if declared > limit:
        raise too_large(limit)
    missing = lease.head + declared - lease.held
    if peak_of(declared) > lease.account.largest or (missing > 0 and not lease.fits(missing)):
        raise over_budget(peak_of(declared), lease.account.largest, declared)
    if coding in ("", UNKNOWN):
        return await _collect(request, lease, limit)
    with holding(lease, INFLATER_BYTES):
        return await _inflate(request, lease, Inflater(coding, limit))


async def _collect(request: web.Request, lease: MemoryLease, limit: int) -> bytes:
    pieces = BytesIO()
    while chunk := await _next(request, lease):
        if pieces.write(chunk) and pieces.tell() > limit:
            raise too_large(limit)
    return pieces.getvalue()  # not a copy: BytesIO hands its buffer over


async def _inflate(request: web.Request, lease: MemoryLease, inflater: Inflater) -> bytes:
    """Decompress slice by slice, in turns with other requests."""
    pieces, turns = BytesIO(), turns_of(asyncio.get_running_loop())
    while chunk := await _next(request, lease):
        inflater.feed(chunk)
        while part := await turns.take(inflater.take):
            if not lease.grow(len(part)):
                raise over_budget(lease.held + len(part), lease.account.largest)
            pieces.write(part)
        lease.shrink(len(chunk))
    inflater.finish()
    return pieces.getvalue()


async def _next(request: web.Request, lease: MemoryLease) -> bytes:
    """The received bytes of the body, b"" at its end."""
    chunk = b"" if lease.refused else await request.content.readany()
    if lease.refused:  # what came was not granted, and what would still come is dropped
        raise over_budget(lease.refused, lease.account.largest)
    return chunk


def too_slow(within_s: float) -> GatewayError:
    return GatewayError(408, "request_timeout", f"The body did not arrive within {within_s:g} s (limits.body_s).")


def too_large(limit: int) -> GatewayError:
    text = f"The body is larger than {limit >> 20} MiB (limits.body_mb). Send less, or raise the limit."
    return GatewayError(413, "request_too_large", text)
