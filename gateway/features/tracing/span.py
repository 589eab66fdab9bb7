"""A finished span for the exporter: plain values that no other thread changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SERVER: Final = "server"
CLIENT: Final = "client"
INTERNAL: Final = "internal"

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]


class Span:
    """A span. Ids are lower-case hexadecimal; begun and ended are Unix nanoseconds. parent_id: "" at the root of a trace.
    remote: the parent is in another process. error: reason of the failure; "": the attributes have it; None: no failure.
    """

    __slots__ = ("attributes", "begun", "ended", "error", "kind", "name", "parent_id", "remote", "span_id", "trace_id")

    def __init__(self, trace_id: str, span_id: str, parent_id: str, name: str, begun: int, ended: int) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.name = name
        self.begun = begun
        self.ended = ended
        self.kind = INTERNAL
        self.remote = False
        self.attributes: dict[str, Value] = {}
        self.error: str | None = None

    def __repr__(self) -> str:
        return f"<Span {self.name!r}, {(self.ended - self.begun) / 1e6:.3f} ms, {self.attributes}>"
