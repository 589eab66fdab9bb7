"""Refuses requests that other HTTP programs might interpret differently. Pure."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote_to_bytes

from aiohttp import HttpVersion10, HttpVersion11, web

from gateway.errors import GatewayError, bad_request

SPOKEN: Final = frozenset([HttpVersion10, HttpVersion11])  # aiohttp's parser takes HTTP/0.9 and 2.0 as well


def refusal_of(request: web.Request) -> GatewayError | None:
    """The error for a request parsed by aiohttp that must not be served; None: serve it."""
    expect = request.headers.get("Expect")
    if expect is not None and expect.lower() != "100-continue":
        return invalid_http("the expectation is not known")
    # aiohttp's parser in Python, which is used where it was not compiled, quotes nothing.
    if not request.raw_path.isascii() and not request.rel_url.raw_path_qs.isascii():
        return invalid_http("the target is not ASCII")
    if "#" in request.raw_path:  # servers cut it off, and would take the path for another one than the gateway does
        return invalid_http("the target has a fragment")
    if has_dot_segment(request.raw_path):
        return invalid_http("the path has a dot segment")
    codings = request.headers.getall("Transfer-Encoding", ())
    if codings and [coding.strip().lower() for coding in codings] != ["chunked"]:
        return GatewayError(501, "unknown_transfer_coding", "The request's Transfer-Encoding is not chunked.")
    return None


def has_dot_segment(target: str) -> bool:
    """Whether a path has a segment `.` or `..`, in any spelling that some server accepts.

    The gateway would forward it unchanged, and the replica, or a proxy before it, would resolve it: the request would reach a
    path that the gateway does not forward.
    """
    path = target.partition("?")[0]
    if "." not in path and "%" not in path:
        return False
    segments = unquote_to_bytes(path).replace(b"\\", b"/").split(b"/")
    return any(segment.partition(b";")[0] in (b".", b"..") for segment in segments)


def invalid_http(why: str) -> GatewayError:
    """The error for invalid HTTP/1.1. why: its first line is used; aiohttp's ends with a colon if the bytes follow below."""
    line = why.encode("ascii", "backslashreplace").decode().splitlines()[0].removesuffix(":")
    return bad_request(f"The request is not valid HTTP/1.1: {line}", code="invalid_http")
