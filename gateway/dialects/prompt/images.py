"""Estimates the tokens of an image from the head of its data.

Vision models cut an image into squares: of 28 x 28 pixels in Qwen's family, about width x height / 750 in Anthropic's. So one
token per 28 x 28 pixels is a good estimate. A constant is used if the size is unknown: a URL, an unknown format. An engine's
count of prompt tokens corrects the rest (`router/learning/scales.py`).

Pure. O(1): at most MAX_SEGMENTS places of the data are read, independent of its length.
"""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final

MAX_TOKENS: Final = 4096  # of one image; models scale larger ones down
UNKNOWN_TOKENS: Final = 1000
MAX_SEGMENTS: Final = 64  # of a JPEG, before its size

_PIXELS_PER_TOKEN: Final = 28 * 28
_DATA: Final = "data:image/"
_BASE64: Final = ";base64,"
_HEAD: Final = 32  # bytes that show the size in all formats but JPEG
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_SIZED: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG's markers of frames, which have its size


def image_tokens(url: str) -> int:
    """The tokens of an image, by its URL. From 1 to MAX_TOKENS."""
    at = url.find(_BASE64, 0, 100) if url.startswith(_DATA) else -1
    return UNKNOWN_TOKENS if at < 0 else data_tokens(url, at + len(_BASE64))


def data_tokens(text: str, start: int = 0) -> int:
    """The tokens of an image in base64 that begins at this index. From 1 to MAX_TOKENS."""
    size = _size_of(text, start)
    if size is None:
        return UNKNOWN_TOKENS
    width, height = size
    return max(1, min(MAX_TOKENS, width * height // _PIXELS_PER_TOKEN))


def _size_of(text: str, start: int) -> tuple[int, int] | None:
    """Width, height in pixels. Formats: W3C PNG, section 11.2.2; GIF89a, section 18; RFC 9649 (WebP); ITU T.81, B.2 (JPEG)."""
    head = _bytes_at(text, start, 0, _HEAD)
    if len(head) < _HEAD:
        return None
    if head.startswith(_PNG):
        width, height = struct.unpack_from(">II", head, 16)
        return width, height
    if head.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", head, 6)
        return width, height
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp_size(head)
    return _jpeg_size(text, start) if head.startswith(b"\xff\xd8") else None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    return None


def _jpeg_size(text: str, start: int) -> tuple[int, int] | None:
    at = 2
    for _ in range(MAX_SEGMENTS):
        segment = _bytes_at(text, start, at, 9)  # 0xFF, marker, length (2), precision, height (2), width (2)
        if len(segment) < 9 or segment[0] != 0xFF:
            return None
        if segment[1] in _SIZED:
            height, width = struct.unpack_from(">HH", segment, 5)
            return width, height
        at += 2 + int.from_bytes(segment[2:4], "big")
    return None


def _bytes_at(text: str, start: int, at: int, count: int) -> bytes:
    """Bytes of the data at this place; fewer, or none, where it ends or is no base64."""
    first = at // 3 * 4
    piece = text[start + first : start + first + (count // 3 + 2) * 4]
    try:
        data = base64.b64decode(piece[: len(piece) // 4 * 4])
    except (binascii.Error, ValueError):
        return b""
    return data[at % 3 : at % 3 + count]
