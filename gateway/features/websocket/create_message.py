"""A message of Responses' WebSocket mode, as the body of a streamed POST /v1/responses.

    {"type": "response.create", "stream_id": "a", "model": ...}   ──►   {"stream": true, "model": ...}
    {..., "generate": false}                                      ──►   {..., "max_output_tokens": 16}, and see `prewarm_events`

With `generate: false` a client (Codex, when it starts) has its instructions and tools computed, and wants no output. Engines do
not know the field, and would answer at length. So they are asked for the minimum that all of them accept, which computes the
prompt and leaves it in the cache, and the client gets an answer without output.

Only these members change: all others are passed on byte for byte (`json_edits.py`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import orjson

from gateway.dialects.events.named import ERRORS, name_of
from gateway.dialects.events.sse import data_of
from gateway.dialects.json_edits import Edit, Members, read_object
from gateway.dialects.json_structure import exceeds, too_complex
from gateway.dialects.responses.stream import QUIET
from gateway.errors import GatewayError, bad_request

CREATE: Final = "response.create"
OPERATION: Final = "websocket.create"  # `create_bounded`, of the parser process

LEAST_OUTPUT: Final = b"16"  # tokens: OpenAI's minimum
_OWN: Final = ("type", "stream_id", "generate")
_COMPLETED: Final = "response.completed"
_ENDS: Final = frozenset([_COMPLETED, "response.incomplete"])
_MAX_END: Final = 1 << 20  # bytes of the last event, which repeats instructions and tools
_STREAM_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_NAMED: Final = 64  # characters of a value that an error quotes
_LONGEST: Final = 512  # bytes of a member; a longer one is not read
_SPACE: Final = b" \t\r\n"


class CreateMessage(NamedTuple):
    """stream_id: the lane that the message names, or "". refers: it continues an earlier response. warms: it wants no output.
    edits: turn the message into a body.
    """

    stream_id: str
    refers: bool
    warms: bool
    edits: list[Edit]


def create_bounded(raw: bytes) -> CreateMessage:
    """`created` for the parser process. Also raises GatewayError 413."""
    if exceeds(raw):
        raise too_complex()
    return created(raw)


def created(raw: bytes) -> CreateMessage:
    """Read a message. Raises GatewayError 400 if it is no request; the request's own fields are checked with its body."""
    try:
        members = read_object(raw)
    except (ValueError, IndexError) as error:
        raise bad_request("A message has to be a JSON object.") from error
    kind = _read(members, "type")
    if kind != CREATE:
        text = f"A message's type has to be {CREATE!r}, got {_shown(kind)}."
        raise GatewayError(400, "unknown_message_type", text, param="type")
    stream_id = _read(members, "stream_id")
    if stream_id is not None and not (isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)):
        raise bad_request("stream_id has to be 1 to 256 letters, digits, dots, lines or underscores.", "stream_id")
    if _read(members, "background") is True:
        raise bad_request("A response in the background needs POST /v1/responses.", "background")
    generate = _read(members, "generate")
    if not (generate is None or isinstance(generate, bool)):
        raise bad_request("generate has to be true or false.", "generate")
    previous = members.spans.get("previous_response_id")
    refers = previous is not None and raw[previous[0] : previous[1]] != b"null"
    warms = generate is False
    values = {"stream": b"true", "max_output_tokens": LEAST_OUTPUT} if warms else {"stream": b"true"}
    return CreateMessage(stream_id or "", refers, warms, _edits(members, values))


def prewarm_events(events: Sequence[bytes]) -> list[bytes]:
    """The events of an answer to a message that wants no output: the output's events are removed, and the status is
    complete.
    """
    return [_without_output(event) for event in events if (name := name_of(event)) in QUIET or name in _ENDS or name in ERRORS]


def _without_output(event: bytes) -> bytes:
    if name_of(event) not in _ENDS or len(event) > _MAX_END:
        return event
    try:
        data = orjson.loads(data_of(event))
    except orjson.JSONDecodeError:
        return event
    response = data.get("response") if isinstance(data, dict) else None
    if not isinstance(response, dict):
        return event
    response.update(status="completed", output=[], incomplete_details=None)
    data["type"] = _COMPLETED
    return b"event: %b\ndata: %b\n\n" % (_COMPLETED.encode(), orjson.dumps(data))


def _read(members: Members, name: str) -> object:
    """A member's value, None without one. A value that is too long is read as "...", which is valid for no member."""
    span = members.spans.get(name)
    if span is None:
        return None
    if span[1] - span[0] > _LONGEST:
        return "..."
    try:
        return orjson.loads(members.raw[span[0] : span[1]])
    except orjson.JSONDecodeError as error:
        raise bad_request(f"{name} is not valid JSON.", name) from error


def _shown(value: object) -> str:
    return "none" if value is None else orjson.dumps(value).decode()[:_NAMED]


def _edits(members: Members, values: Mapping[str, bytes]) -> list[Edit]:
    """The edits that remove the members of the WebSocket protocol, and set these values (JSON)."""
    raw, gone = members.raw, [name for name in _OWN if name in members.spans]
    edits = [(*members.spans[name], value) for name, value in values.items() if name in members.spans]
    if new := b",".join(b'"%b":%b' % (name.encode(), value) for name, value in values.items() if name not in members.spans):
        begin = raw.index(b"{") + 1
        edits.append((begin, begin, new + b"," if len(members.spans) > len(gone) else new))
    cuts = list[tuple[int, int]]()
    for begin, end in sorted(_member(members, name) for name in gone):
        if cuts and cuts[-1][1] == begin:
            cuts[-1] = cuts[-1][0], end
        else:
            cuts.append((begin, end))
    for begin, end in cuts:
        last = raw[end : end + 1] == b"}"
        edits.append((_before_comma(raw, begin) if last else begin, end, b""))
    return edits


def _member(members: Members, name: str) -> tuple[int, int]:
    """(start, end) of a member: end is the start of the next one, or the end of the object. Raises GatewayError 400."""
    raw, (begin, end) = members.raw, members.spans[name]
    quoted = b'"%b"' % name.encode("ascii")
    begin = _space_before(raw, begin) - 1  # the colon
    begin = _space_before(raw, begin) - len(quoted)
    if raw[begin : begin + len(quoted)] != quoted:
        raise bad_request(f"{name} has to be written without escapes.", name)
    end = _space_behind(raw, end)
    return begin, _space_behind(raw, end + 1) if raw[end : end + 1] == b"," else end


def _before_comma(raw: bytes, at: int) -> int:
    """The offset of the comma before the last member, `at` if there is none."""
    before = _space_before(raw, at)
    return before - 1 if raw[before - 1 : before] == b"," else at


def _space_before(raw: bytes, at: int) -> int:
    while raw[at - 1] in _SPACE:
        at -= 1
    return at


def _space_behind(raw: bytes, at: int) -> int:
    while at < len(raw) and raw[at] in _SPACE:
        at += 1
    return at
