"""Parser of requests' heads. Pure.

All HTTP programs that a request passes must agree on its end (RFC 9112, section 11.2), so everything that some of them might
read differently is refused: two lengths, a length beside a transfer coding, a coding other than `chunked`, folded lines, bare
CR or LF, spaces before a colon, control characters, a repeated header that must be unique. The same holds for the path that the
gateway forwards: no fragment, no dot segment in any spelling.

The heads of one client mostly differ only in their length: parsed heads are cached without it, with the values derived from
them. So a plain request costs two searches and a look-up.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote, unquote_to_bytes

from gateway.errors import GatewayError, bad_request, head_too_large, line_too_long
from gateway.request.client import Caller
from gateway.server.http.inflate import CODINGS
from gateway.upstream.http1 import split_length

MAX_HEAD_BYTES: Final = 64 << 10  # request line and headers
MAX_LINE_BYTES: Final = 8190  # the request line
MAX_FIELDS: Final = 128
HEAD_COPIES: Final = 3  # of a head in memory: as received, its parsed headers, overhead of objects
CACHED_BYTES: Final = 2048
UNKNOWN_CODING: Final = "unknown"
HTTP_VERSION: Final = 505

_CACHED: Final = 256  # heads
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_VALUE: Final = rb"[^\x00-\x08\x0a-\x1f\x7f]*+"
_METHOD: Final = rb"[A-Z]{3,7}+"
_TARGET: Final = rb"[!-~]++"
_HEAD: Final = re.compile(rb"(%s) (%s) HTTP/1\.([01])\r\n((?:%s:%s\r\n)*+)\r\n" % (_METHOD, _TARGET, _TOKEN, _VALUE))
_FIELD: Final = re.compile(rb"([^:]++):([^\r]*+)\r\n")
_OTHER_VERSION: Final = re.compile(rb"%s %s(?: HTTP/[0-9]\.[0-9])?\r\n" % (_METHOD, _TARGET))
_BEGIN: Final = re.compile(rb"[A-Z]{1,7}+(?: |\Z)")
_LENGTH: Final = re.compile(rb"[0-9]{1,12}")
_ABSOLUTE: Final = re.compile(r"https?://[^/?#]*(.*)", re.IGNORECASE)
_ONCE: Final = frozenset(
    b"content-length content-location content-range content-type etag expect host max-forwards server transfer-encoding"
    b" user-agent".split()
)
_METHODS: Final = frozenset(b"DELETE GET HEAD OPTIONS PATCH POST PUT TRACE".split())
_FRAMING: Final = frozenset([b"content-length", b"transfer-encoding"])
_NOT_ASKED: Final = "\r"  # cannot be a header's value


class HeaderFields:
    """A head's headers, by names in any case. raw: the first value of each, by names in lower case.

    Values that were looked up are cached as text: only the gateway's code looks them up, so there are few names.
    """

    __slots__ = ("_asked", "_pairs", "raw")

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self.raw = {name.lower(): value for name, value in reversed(pairs)}
        self._pairs = pairs if len(self.raw) < len(pairs) else []  # only if a name is repeated
        self._asked: dict[str, str | None] = {}

    def get(self, name: str, /) -> str | None:
        asked = self._asked.get(name, _NOT_ASKED)
        return asked if asked is not _NOT_ASKED else self._find(name)

    def joined(self, name: str) -> str:
        """All values of a header that is a list, joined by commas; "" if it is absent."""
        if not self._pairs:
            return self.get(name) or ""
        return ",".join(_text(value) for each, value in self._pairs if each.lower() == name.lower().encode("ascii"))

    def repeats(self, name: str) -> bool:
        return sum(each.lower() == name.lower().encode("ascii") for each, _ in self._pairs) > 1

    @property
    def distinct(self) -> bool:
        """True if no name is repeated."""
        return not self._pairs

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def _find(self, name: str) -> str | None:
        value = self.raw.get(name.lower().encode("ascii"))
        self._asked[name] = found = None if value is None else _text(value)
        return found

    def __repr__(self) -> str:
        return f"<HeaderFields {list(self.raw)}>"


class RequestHead:
    """A head without the Content-Length that `read_head` has found. Cached.

    target: path and query for a replica. path: decoded, without its query. http11: HTTP/1.1, else 1.0. length: of a
    Content-Length in an unusual spelling; -1: none. coding: the content coding. expects: the client waits for a 100. simple:
    HTTP/1.1, no host in the target, no repeated header. Derived values: upstream_lines, its header lines for a replica; direct,
    True if it came without a proxy (`access.py`); caller, as named in it; derived, further ones by their functions.
    """

    __slots__ = (
        "caller",
        "chunked",
        "coding",
        "derived",
        "direct",
        "expects",
        "fields",
        "headers",
        "http11",
        "keep_alive",
        "length",
        "method",
        "path",
        "simple",
        "target",
        "upstream_lines",
    )

    def __init__(self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], *, http11: bool) -> None:
        """Raises GatewayError."""
        if method not in _METHODS:
            raise invalid_http("its method is not known")
        self.method = method.decode("ascii")
        self.http11 = http11
        self.headers = headers
        self.fields = fields = HeaderFields(headers)
        if http11 and b"host" not in fields.raw:
            raise invalid_http("Host is missing")
        self.target, self.path = _target_of(target)
        tokens = [token.strip().lower() for token in fields.joined("Connection").split(",")]
        self.keep_alive = "close" not in tokens and (http11 or "keep-alive" in tokens)
        self.length, self.chunked = _framing_of(fields, http11=http11)
        coding = fields.joined("Content-Encoding").strip().lower()
        self.coding = "" if coding in ("", "identity") else CODINGS.get(coding, UNKNOWN_CODING)
        expect = fields.get("Expect")
        if expect is not None and expect.lower() != "100-continue":
            raise GatewayError(417, "invalid_http", "The only known expectation is 100-continue (the header Expect).")
        self.expects = expect is not None and http11
        self.simple = http11 and target.startswith(b"/") and fields.distinct
        self.upstream_lines: bytes | None = None
        self.direct: bool | None = None
        self.caller: Caller | None = None
        self.derived: dict[object, Any] = {}

    def __repr__(self) -> str:
        return f"<RequestHead {self.method} {self.target}, {self.fields!r}>"


class RequestStart:
    """The request at the start of some bytes. length: of its body, unless it is chunked. end: offset of its body."""

    __slots__ = ("end", "head", "length")

    def __init__(self, head: RequestHead, length: int, end: int) -> None:
        self.head = head
        self.length = length
        self.end = end


def read_head(data: bytes) -> RequestStart | None:
    """The request at the start of `data`; None: its head is incomplete. Raises GatewayError for an invalid request."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    if end == 3:
        check_begin(data)
        return None
    known, length = split_length(data[:end])
    head = _cached(known) if len(known) <= CACHED_BYTES else _parse(known)
    if length < 0:
        return RequestStart(head, max(head.length, 0), end)
    if head.length >= 0 or head.chunked:
        raise _two_framings(chunked=head.chunked)
    return RequestStart(head, length, end)


def check_begin(data: bytes | bytearray) -> None:
    """Raises GatewayError if no valid head begins with these bytes."""
    if data and not _BEGIN.match(data):
        raise invalid_http("its first line is no request line")
    line = data.find(b"\n", 0, MAX_LINE_BYTES)
    if line < 0 and len(data) > MAX_LINE_BYTES:
        raise line_too_long(MAX_LINE_BYTES)
    if line > 0 and data[line - 1] != 0x0D:
        raise invalid_http("its first line has no CRLF")
    if len(data) > MAX_HEAD_BYTES:
        if data.count(b"\n", 0, MAX_HEAD_BYTES) > MAX_FIELDS:
            raise invalid_http("it has too many headers")
        raise head_too_large(MAX_HEAD_BYTES)


def _parse(data: bytes) -> RequestHead:
    """Parse a whole head without its Content-Length. Raises GatewayError."""
    found = _HEAD.fullmatch(data)
    if found is None:
        raise _refusal_of(data)
    if found.start(4) > MAX_LINE_BYTES:
        raise line_too_long(MAX_LINE_BYTES)
    pairs = _FIELD.findall(found[4])
    if any(b"\t" in value and name.lower() in _FRAMING for name, value in pairs):
        raise invalid_http("there is a tab in its framing")  # not every parser strips tabs
    headers = [(name, value.strip(b" \t")) for name, value in pairs]
    if len(headers) > MAX_FIELDS:
        raise invalid_http("it has too many headers")
    return RequestHead(found[1], found[2], headers, http11=found[3] == b"1")


_cached: Final = lru_cache(maxsize=_CACHED)(_parse)


def _refusal_of(data: bytes) -> GatewayError:
    line = data[: data.find(b"\r\n") + 2]
    if _OTHER_VERSION.fullmatch(line) and not line.endswith((b" HTTP/1.1\r\n", b" HTTP/1.0\r\n")):
        return GatewayError(HTTP_VERSION, "http_version", "The gateway speaks versions 1.1 and 1.0 of HTTP.")
    return invalid_http("its headers cannot be read" if _OTHER_VERSION.fullmatch(line) else "its first line is no request line")


def _framing_of(fields: HeaderFields, *, http11: bool) -> tuple[int, bool]:
    """(length, chunked) by RFC 9112, section 6.3, without its guesses. Raises GatewayError."""
    if not fields.distinct:
        for name in _ONCE:
            if fields.repeats(name.decode("ascii")):
                raise invalid_http(f"{name.decode('ascii').title()} comes twice")
    coding, length = fields.raw.get(b"transfer-encoding"), fields.raw.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise _two_framings(chunked=True)
        if coding.lower() != b"chunked":
            if not coding.lower().endswith(b"chunked"):
                raise invalid_http("its body has no end")
            raise GatewayError(501, "unknown_transfer_coding", "The request's Transfer-Encoding is not chunked.")
        if not http11:
            raise invalid_http("HTTP/1.0 has no Transfer-Encoding")
        return -1, True
    if length is None:
        return -1, False
    if not _LENGTH.fullmatch(length):
        raise invalid_http("Content-Length is no number")
    return int(length), False


def _two_framings(*, chunked: bool) -> GatewayError:
    return invalid_http("Content-Length can't be present with Transfer-Encoding" if chunked else "Content-Length comes twice")


def _target_of(target: bytes) -> tuple[str, str]:
    """(target, path) of a RequestHead. Raises GatewayError."""
    text = target.decode("ascii")
    if found := _ABSOLUTE.fullmatch(text):
        text = found[1] if found[1].startswith("/") else "/" + found[1]
    if not text.startswith("/") and text != "*":
        raise invalid_http("its target is no path")
    if "#" in text:  # servers remove a fragment, and would read another path than the gateway
        raise invalid_http("the target has a fragment")
    path = text.partition("?")[0]
    if has_dot_segment(path):
        raise invalid_http("the path has a dot segment")
    return text, unquote(path) if "%" in path else path


def has_dot_segment(path: str) -> bool:
    """True if a path has a segment `.` or `..`, in any spelling that some server accepts.

    The gateway would forward it unchanged, and the replica, or a proxy before it, would resolve it: the request would reach a
    path that the gateway does not forward.
    """
    if "." not in path and "%" not in path:
        return False
    segments = unquote_to_bytes(path).replace(b"\\", b"/").split(b"/")
    return any(segment.partition(b";")[0] in (b".", b"..") for segment in segments)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def invalid_http(why: str) -> GatewayError:
    return bad_request(f"The request is not valid HTTP/1.1: {why}", code="invalid_http")
