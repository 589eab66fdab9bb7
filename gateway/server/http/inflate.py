"""Decompresses a request's body, slice by slice, with bounds on its size. Pure.

A kilobyte of gzip may expand to a megabyte, a megabyte to a gigabyte. So no call makes more than a slice, and a body may
exceed neither the limit of bodies nor, beyond RATIO_FROM bytes, RATIO times its compressed size. JSON of prompts shrinks to a
third or a tenth, a list of equal numbers to a hundredth at most.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gateway.errors import GatewayError, bad_request

GZIP: Final = "gzip"
DEFLATE: Final = "deflate"
CODINGS: Final[Mapping[str, str]] = MappingProxyType({"gzip": GZIP, "x-gzip": GZIP, "deflate": DEFLATE})  # RFC 9110, 8.4.1

SLICE: Final = 1 << 18
THREAD_SLICE: Final = 1 << 20  # in a thread, to which each call has to be handed over
INFLATER_BYTES: Final = 48 << 10  # memory of a decompressor without its output: zlib's window and tables
RATIO: Final = 100
RATIO_FROM: Final = 1 << 20
MAX_MEMBERS: Final = 64  # parts of a gzip file; each costs a decompressor


class Inflater:
    """`feed` compressed bytes, then `take` until b"", repeatedly; `finish` at the end. All raise GatewayError 400 or 413."""

    __slots__ = ("_coding", "_cut", "_fed", "_limit", "_made", "_members", "_rest", "_stream")

    def __init__(self, coding: str, limit: int) -> None:
        """coding: GZIP or DEFLATE. limit: in bytes, of input and of output."""
        self._coding = coding
        self._limit = limit
        self._fed = 0
        self._made = 0
        self._members = 0
        self._rest = b""  # compressed bytes not yet consumed
        self._cut = False
        self._stream: zlib._Decompress | None = None

    def feed(self, data: bytes) -> None:
        """Add compressed bytes. O(data), if all earlier output was taken."""
        self._fed += len(data)
        if self._fed > self._limit:
            raise self._too_large()
        self._rest = self._rest + data if self._rest else data

    @property
    def idle(self) -> bool:
        """True if `take` needs more input."""
        return not (self._rest or self._cut)

    def take(self, most: int = SLICE) -> bytes:
        """The next bytes, at most `most`; b"" if more input is needed."""
        while self._rest or self._cut:
            stream = self._stream or self._next_stream()
            try:
                made = stream.decompress(self._rest, most)
            except zlib.error as error:
                raise _broken() from error
            # A truncated output may leave data inside the decompressor although all input was consumed.
            self._cut = len(made) == most and not stream.eof
            if stream.eof:
                self._rest, self._stream = stream.unused_data, None
            else:
                self._rest = stream.unconsumed_tail
            if made:
                self._count(len(made))
                return made
        return b""

    def finish(self) -> None:
        """The end of the input. Raises GatewayError if the stream is incomplete."""
        if self._stream is not None:
            raise _broken()

    def _next_stream(self) -> zlib._Decompress:
        self._members += 1
        if self._members > (MAX_MEMBERS if self._coding == GZIP else 1):
            raise _broken()
        bits = 16 + zlib.MAX_WBITS
        if self._coding == DEFLATE:  # RFC 9110 wants zlib's head, but some clients omit it
            bits = zlib.MAX_WBITS if self._rest[0] & 15 == 8 else -zlib.MAX_WBITS
        self._stream = stream = zlib.decompressobj(wbits=bits)
        return stream

    def _count(self, made: int) -> None:
        self._made += made
        if self._made > self._limit:
            raise self._too_large()
        if self._made > max(RATIO_FROM, RATIO * (self._fed - len(self._rest))):
            text = f"The body becomes more than {RATIO} times as long by decompression. Send it uncompressed."
            raise GatewayError(413, "request_too_large", text)

    def _too_large(self) -> GatewayError:
        text = f"The body is larger than {self._limit >> 20} MiB when decompressed (limits.body_mb)."
        return GatewayError(413, "request_too_large", f"{text} Send less, or raise the limit.")

    def __repr__(self) -> str:
        return f"<Inflater {self._coding}, {self._fed} bytes in, {self._made} out>"


def _broken() -> GatewayError:
    return bad_request("The body cannot be read: its encoding is broken.", code="invalid_body")
