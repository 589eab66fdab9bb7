"""The parts of a body that are left out: the longest known beginning of its log, and its frame if it is known. Pure.

whole      keep, unbound, expect           {"tools": [...], "messages": [system, user, assistant, user]}
base       keep, unbound, base, expect     {"tools": [...], "messages": [system, user]}
frame too  keep, ..., base, frame, expect  {"tools": null,  "messages": [user]}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.dialects.json_edits import Edit
from gateway.features.prompt_log.delta.outline import BodyOutline, CutPlace
from gateway.features.prompt_log.header import HEADER
from gateway.features.prompt_log.naming.chain import frame_name, head_name

_EMPTY_FRAME: Final = frame_name({})
Known = Callable[[bytes], bool]
"""True for the key of a log, or of a frame, that the other gateway has acknowledged."""


class DeltaPlan(NamedTuple):
    """edits: of the body. base: the place at which it is cut; None: nowhere. named: the frame goes by name. header: a line."""

    edits: list[Edit]
    base: CutPlace | None
    named: bool
    header: bytes

    @property
    def cuts(self) -> bool:
        """True if a part of the body is left out."""
        return bool(self.edits)

    @property
    def saved(self) -> int:
        """Bytes that are left out."""
        return sum(end - start - len(new) for start, end, new in self.edits)


def plan_of(outline: BodyOutline, known: Known) -> DeltaPlan:
    """The plan for a gateway that knows these logs and frames. O(places)."""
    if not outline.places:
        return whole_plan(outline)
    named = outline.frame != _EMPTY_FRAME and known(frame_key(outline.frame))
    first, base = outline.places[0], None
    for place in reversed(outline.places[1:]):
        if (named or not place.system) and known(log_key(place.chain, place.open)):
            base = place
            break
    edits = list(outline.framed) if named else []
    begin, end = outline.list_at if named else first.at, base.at if base is not None else first.at
    if begin < end:
        edits.append((begin, end, b""))
    return DeltaPlan(edits, base, named, _header(outline, base, named=named)) if edits else whole_plan(outline)


def whole_plan(outline: BodyOutline) -> DeltaPlan:
    """The plan that leaves nothing out."""
    return DeltaPlan([], None, named=False, header=_header(outline, None, named=False))


def log_key(chain: bytes, open_: bytes) -> bytes:
    """The key of a log. open_: the digest of its open calls."""
    return chain + open_


def frame_key(frame: str) -> bytes:
    return frame.encode("ascii")


def _header(outline: BodyOutline, base: CutPlace | None, *, named: bool) -> bytes:
    parts = ["keep", "unbound"]  # without the header, too, no sealed part binds a request
    if base is not None:
        parts.append(f'base="{head_name(base.chain)}"')
    if named:
        parts.append(f'frame="{outline.frame}"')
    parts.append(f'expect="{head_name(outline.chain)}"')
    return f"{HEADER}: {', '.join(parts)}\r\n".encode("ascii")
