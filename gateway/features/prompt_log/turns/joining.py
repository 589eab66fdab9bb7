"""The whole body after a base: its frame, the stored turns, and its own turns, as bytes. Pure.

    {"messages": [own]}   ->   {"messages": [frame, base, own], "tools": of the frame}

The model's prompt is the same as of a body with the whole history, so any replica can answer it.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.dialects.json_edits import Edit, Members, apply, read_object
from gateway.features.prompt_log.naming.forms import MESSAGES
from gateway.features.prompt_log.turns.own_turn import LISTS, OwnTurn


def joined(own: OwnTurn, pieces: Sequence[bytes]) -> list[Edit]:
    """The edits that put elements before the own ones of a body. pieces: JSON, to be joined by commas; none is empty."""
    if not pieces:
        return []
    if own.begin < own.end:
        return [(own.begin, own.begin, b",".join(pieces) + b",")]
    return [(own.begin, own.begin, b",".join([b"", *pieces] if own.leading else pieces))]


def body_of_log(model: str, form: str, framed: bytes, pieces: Sequence[bytes]) -> bytes:
    """A body with a whole log. framed: the members of its frame; b"": none. pieces: its elements, JSON joined by commas."""
    found = read_object(framed or b"{}")
    values = {name: framed[start:end] for name, (start, end) in found.spans.items()}
    leading = values.pop(LISTS[form], b"[]")[1:-1]
    elements = b",".join(piece for piece in (leading, *pieces) if piece)
    more = {"max_tokens": b"1"} if form == MESSAGES else {}  # Messages requires it
    members = {"model": orjson.dumps(model), **more, **values, LISTS[form]: b"[%b]" % elements}
    return b"{%b}" % b",".join(b"%b:%b" % (orjson.dumps(name), value) for name, value in members.items())


def frame_edits(members: Members, form: str, framed: bytes) -> tuple[list[Edit], bytes]:
    """The edits that set the members of a frame in a body without one, and the frame's elements of the list of turns."""
    found = read_object(framed)
    values = {name: framed[start:end] for name, (start, end) in found.spans.items()}
    leading = values.pop(LISTS[form], b"[]")[1:-1]
    span, reasoning = members.spans.get("reasoning"), values.get("reasoning")
    if reasoning is not None and span is not None and members.raw[span[0] : span[0] + 1] == b"{":
        effort, own = read_object(reasoning), members.raw[span[0] : span[1]]
        first, last = effort.spans["effort"]
        values["reasoning"] = apply(own, [read_object(own).put("effort", reasoning[first:last])])
    return members.put_all(values), leading
