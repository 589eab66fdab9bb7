"""Reading a request's body: whole, decompressed, within its limits, or an error that says what to do.

A body is held once. What arrives is charged to the request's lease by whoever reads the connection (`plain.py`, `bounds.py`);
what decompression adds is charged here. Nobody between here and the replica keeps a reference to the bytes but the request that
goes upstream, so that they can be dropped while the answer is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from io import BytesIO
from typing import Final, TypeGuard

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDictProxy

from gateway.budget import PARSE_COPIES, Lease, peak_of
from gateway.errors import GatewayError, bad_request, over_budget
from gateway.inflate import CODINGS, INFLATER_BYTES, Inflater
from gateway.plain import PlainRequest
from gateway.turns import turns_of

UNKNOWN: Final = "unknown"


def lease_of(request: web.Request | PlainRequest) -> Lease:
    """What of the budget a request that is being handled holds."""
    if isinstance(request, PlainRequest):
        return request.lease
    lease = request.protocol.lease  # type: ignore[attr-defined]  # client.ClientConnection
    assert isinstance(lease, Lease)
    return lease


def body_here(request: web.Request | PlainRequest) -> TypeGuard[PlainRequest]:
    """Whether it is a plain request whose body is here already, as most are: `take` gives it without waiting."""
    return isinstance(request, PlainRequest) and request.here


def complete(request: web.Request | PlainRequest) -> bool:
    """Whether the whole request has arrived; if not, what is still to come of it has to be dropped before the next one."""
    if isinstance(request, PlainRequest):
        return request.complete
    return request.content.is_eof() and not lease_of(request).refused


def coding_of(request: web.Request | PlainRequest) -> str:
    """The content coding of a body: "" (none), one of CODINGS, or UNKNOWN."""
    if isinstance(request, PlainRequest):
        return ""
    return _coding_of(request.headers)


def _coding_of(headers: CIMultiDictProxy[str]) -> str:
    text = ",".join(headers.getall("Content-Encoding", ())).strip().lower()
    if text in ("", "identity"):
        return ""
    return CODINGS.get(text, UNKNOWN)


async def read_body(request: web.Request | PlainRequest, within_s: float, *, opaque: bool = False) -> bytes:
    """The body, decompressed. opaque: one in a coding that we do not know is passed on as it came.

    Raises GatewayError: 400 (its coding is broken), 408, 413, 415, 503 (no memory for it now).
    """
    try:
        async with asyncio.timeout(within_s):
            if isinstance(request, PlainRequest):
                await request.arrived()
                return request.take()
            return await _read(request, opaque=opaque)
    except TimeoutError as late:
        text = f"The body did not arrive within {within_s:g} s (limits.body_s)."
        raise GatewayError(408, "request_timeout", text) from late
    except (web.RequestPayloadError, HttpProcessingError, ClientPayloadError) as broken:
        raise bad_request("The body cannot be read: its encoding is broken.", code="invalid_body") from broken


async def _read(request: web.Request, *, opaque: bool) -> bytes:
    coding, limit, lease = coding_of(request), request.client_max_size, lease_of(request)
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


async def _collect(request: web.Request, lease: Lease, limit: int) -> bytes:
    pieces = BytesIO()
    while chunk := await _next(request, lease):
        if pieces.write(chunk) and pieces.tell() > limit:
            raise too_large(limit)
    return pieces.getvalue()  # not a copy: BytesIO hands its buffer over


async def _inflate(request: web.Request, lease: Lease, inflater: Inflater) -> bytes:
    """Decompress what comes, slice by slice, in turn with everybody else."""
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


async def _next(request: web.Request, lease: Lease) -> bytes:
    """What has come of the body, b"" at its end."""
    chunk = b"" if lease.refused else await request.content.readany()
    if lease.refused:  # what came was not granted, and what would still come is dropped
        raise over_budget(lease.refused, lease.account.largest)
    return chunk


def too_large(limit: int) -> GatewayError:
    text = f"The body is larger than {limit >> 20} MiB (limits.body_mb). Send less, or raise the limit."
    return GatewayError(413, "request_too_large", text)


@contextlib.contextmanager
def holding(lease: Lease, size: int, body: int = 0) -> Iterator[None]:
    """Charge memory that something takes, as long as that takes. Raises GatewayError 503 or 413 if there is no room.

    body: the size of the body that it is needed for, if that is known.
    """
    if not lease.grow(size):
        raise over_budget(lease.held + size, lease.account.largest, body)
    try:
        yield
    finally:
        lease.shrink(size)


def parsing(lease: Lease, size: int) -> contextlib.AbstractContextManager[None]:
    """Charge what it takes to parse a large body, as long as that takes. Raises GatewayError 503 or 413 if there is no room."""
    return holding(lease, PARSE_COPIES * size, size)
