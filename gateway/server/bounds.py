"""Bounds and prices that both servers have: the one of `http/` and the one of `fallback/`."""

from __future__ import annotations

from typing import Final

MAX_HEADER_BYTES: Final = 64 << 10  # one header line: tokens and cookies can be long
HEAD_COPIES: Final = 3  # of a head in aiohttp: raw headers, decoded headers, object overhead
MAX_UNCHARGED: Final = 8 << 10  # bytes in the write buffer of a connection that are not charged
