"""W3C trace context (https://www.w3.org/TR/trace-context/): the trace of a request. Pure.

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
                 version  trace id (16 bytes)         parent's span id  flags; 1: sampled
    tracestate:  vendor=value,other=value             forwarded; at most 32 members

An invalid traceparent starts a new trace, and its tracestate is dropped. An invalid tracestate is dropped too. Requests that
are not traced keep both headers, byte for byte.
"""

from __future__ import annotations

import re
from typing import Final

HEADER: Final = "Traceparent"
SAMPLED: Final = 1  # flag bit
MAX_MEMBERS: Final = 32  # of a tracestate, by the standard
MAX_STATE: Final = 512  # characters of a forwarded tracestate; the standard's minimum
LONG_MEMBER: Final = 128  # characters; longer members are dropped first

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_MEMBER: Final = re.compile(rb"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_LINE: Final = re.compile(rb"(?mi)^trace(parent|state):[ \t]*([^\r\n]*)\r\n")


class TraceParent:
    """A valid traceparent. Ids are lower-case hexadecimal."""

    __slots__ = ("flags", "span_id", "trace_id")

    def __init__(self, trace_id: str, span_id: str, flags: int) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.flags = flags

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def __repr__(self) -> str:
        return f"<TraceParent {self.trace_id}-{self.span_id}-{self.flags:02x}>"


def parse_traceparent(header: str) -> TraceParent | None:
    """Parse a traceparent; None: it is not valid. Of later versions, the fields of version 00 are read (by the standard)."""
    found = _PARENT.fullmatch(header.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceParent(trace_id, span_id, int(flags, 16))


def traceparent(trace_id: str, span_id: str, flags: int = SAMPLED) -> bytes:
    """The header's value."""
    return f"00-{trace_id}-{span_id}-{flags:02x}".encode("ascii")


def bounded_tracestate(values: list[bytes]) -> bytes:
    """Join the values of all tracestate headers, in their order; b"": there is nothing to forward.

    An invalid tracestate is dropped. If it is too long, long members are dropped, then the oldest (at the end). O(bytes).
    """
    stripped = (member.strip(b" \t") for member in b",".join(values).split(b","))
    members = [member for member in stripped if member]
    if len(members) > MAX_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return b""
    if len({member.partition(b"=")[0] for member in members}) != len(members):
        return b""
    if _length(members) > MAX_STATE:
        members = [member for member in members if len(member) <= LONG_MEMBER]
    while _length(members) > MAX_STATE:
        members.pop()
    return b",".join(members)


def _length(members: list[bytes]) -> int:
    return sum(map(len, members)) + max(0, len(members) - 1)


def with_parent(lines: bytes, parent: bytes, *, keeps_state: bool) -> bytes:
    """Replaces the traceparent in header lines. keeps_state: their tracestate belongs to the trace."""
    state = b""
    if keeps_state:
        state = bounded_tracestate([value for which, value in _LINE.findall(lines) if which.lower() == b"state"])
    rest = _LINE.sub(b"", lines)
    return b"%btraceparent: %b\r\n%b" % (rest, parent, b"tracestate: %b\r\n" % state if state else b"")
