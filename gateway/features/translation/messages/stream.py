"""A chat stream as Messages' events.

Clients expect one block after the other: a block begins when the one before it has ended. Chat has no blocks, and any delta may
belong to any call of a tool. So blocks wait in a queue, and the first one is open:

    delta ──► its block (a new one at the end) ──► the first: an event at once; any other: held
    the first has ended, and another one waits ──► content_block_stop, content_block_start, what was held

A text and a thought end when anything else begins; a call when its arguments are a whole JSON object, or with the stream. A
call begins when its name is known (arguments without any name are the replica's failure). Models write one call after the
other, so in practice nothing is held.

Bounds: MAX_BLOCKS blocks wait, with MAX_HELD characters; MAX_CALLS calls. Beyond: ReplicaFailure.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Final

import orjson

from gateway.dialects.anthropic.errors import error_event
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError, ReplicaFailure
from gateway.features.translation.messages.answer import (
    MAX_CALLS,
    arguments_of,
    call_id,
    counts_of,
    ending,
    message_id,
    name_of,
    said_of,
    start_of,
    thought_of,
    too_many_calls,
)
from gateway.features.translation.messages.echo import Echo
from gateway.features.translation.translation import EventWriter, nameless_call

MAX_BLOCKS: Final = 1024
MAX_HELD: Final = 4 << 20  # characters

_TEXT, _THINKING, _TOOL = "text", "thinking", "tool_use"
_OUTSIDE: Final = re.compile(r'[{}\[\]"]')
_INSIDE: Final = re.compile(r'["\\]')


class JsonEnd:
    """Finds out when a text that comes in pieces is a whole JSON object, if it is JSON at all. O(characters)."""

    __slots__ = ("_depth", "_escaped", "_inside", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._inside = False  # a string
        self._escaped = False  # the last character was the backslash of an escape

    def feed(self, text: str) -> None:
        at = int(self._escaped)
        if text:
            self._escaped = False
        while not self.complete and at < len(text):
            found = (_INSIDE if self._inside else _OUTSIDE).search(text, at)
            if found is None:
                return
            at = found.end()
            sign = text[at - 1]
            if sign == '"':
                self._inside = not self._inside
            elif self._inside:
                self._escaped = at == len(text)
                at += 1
            else:
                self._depth += 1 if sign in "{[" else -1
                self.complete = self._depth <= 0


class _Block:
    """index: in the message; -1: it has not begun. id, number: of a call."""

    __slots__ = ("end", "held", "id", "index", "kind", "name", "over")

    def __init__(self, kind: str, id_: str = "") -> None:
        self.kind = kind
        self.index = -1
        self.id = id_
        self.name = ""
        self.held = list[str]()
        self.end = JsonEnd()
        self.over = False

    def may_begin(self) -> bool:
        return self.kind != _TOOL or self.name != ""

    def may_end(self) -> bool:
        return self.kind != _TOOL or self.end.complete

    def start(self) -> dict[str, Any]:
        if self.kind == _TOOL:
            return {"type": _TOOL, "id": self.id, "name": self.name, "input": {}}
        return {"type": _TEXT, "text": ""} if self.kind == _TEXT else {"type": _THINKING, "thinking": "", "signature": ""}

    def delta(self, text: str) -> dict[str, Any]:
        if self.kind == _TOOL:
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": "text_delta", "text": text} if self.kind == _TEXT else {"type": "thinking_delta", "thinking": text}


class MessageWriter(EventWriter):
    """One answer."""

    def __init__(self, echo: Echo) -> None:
        self._echo = echo
        self._id = ""
        self._blocks = deque[_Block]()  # that are not over
        self._calls = dict[int, _Block]()  # by their index in chat; the last one of that index
        self._ids = set[str]()  # of calls
        self._count = 0  # of calls
        self._next = 0  # the index of the next block
        self._held = 0
        self._called = False
        self._stop = ""

    def begin(self, chunk: dict[str, Any]) -> bytes:
        self._id = message_id(chunk)
        return _event({"type": "message_start", "message": start_of(chunk, self._id)})

    def delta(self, delta: dict[str, Any]) -> bytes:
        if self._echo.empty:
            return b""
        out = list[bytes]()
        if thought := thought_of(delta):
            self._say(_THINKING, thought, out)
        if text := said_of(delta):
            self._say(_TEXT, text, out)
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            for call in calls:
                if isinstance(call, dict):
                    self._call(call, out)
        return b"".join(out)

    def stopped(self, text: str) -> None:
        self._stop = text

    def end(self, reason: str, usage: Usage | None) -> bytes:
        out = list[bytes]()
        while self._blocks:
            block = self._blocks.popleft()
            if block.index < 0:
                if not block.may_begin():
                    if block.held:
                        raise nameless_call()
                    continue
                self._start(block, out)
            out.append(_event({"type": "content_block_stop", "index": block.index}))
        reason = "length" if self._echo.empty else reason
        stop_reason, sequence = ending(reason, self._stop, self._echo, called=self._called)
        delta = {"stop_reason": stop_reason, "stop_sequence": sequence}
        out.append(_event({"type": "message_delta", "delta": delta, "usage": counts_of(usage)}))
        out.append(_event({"type": "message_stop"}))
        return b"".join(out)

    def failed(self, message: str) -> bytes:
        return error_event(GatewayError(500, "replica_error", message))

    # -- blocks

    def _say(self, kind: str, text: str, out: list[bytes]) -> None:
        last = self._blocks[-1] if self._blocks else None
        if last is None or last.kind != kind:
            last = _Block(kind)
            self._append(last, out)
        self._write(last, text, out)

    def _call(self, call: dict[str, Any], out: list[bytes]) -> None:
        function = call.get("function")
        if not isinstance(function, dict):
            return
        name = name_of(function)
        block = self._block_of(call, name, out)
        if not block.over and name and not block.name:
            block.name = name
            self._called = True
            self._advance(out)
        if not block.over and (arguments := arguments_of(function)):  # else its arguments are complete
            self._write(block, arguments, out)

    def _block_of(self, call: dict[str, Any], name: str, out: list[bytes]) -> _Block:
        """The block of a call. Some engines have no indexes, or the same for all calls: a name with another id is another
        call, and so is one with neither index nor id. (Some give each delta a new id, but the name only once.)
        """
        index, id_ = call.get("index"), call.get("id")
        if not isinstance(index, int) or isinstance(index, bool):
            index = -1
        known = self._calls.get(index)
        other = id_ != known.id if known is not None and isinstance(id_, str) and id_ else index == -1
        if known is not None and not (name and known.name and other):
            return known
        if self._count >= MAX_CALLS:
            raise too_many_calls()
        block = _Block(_TOOL, call_id(id_, self._id, self._count, self._ids))
        self._count += 1
        self._calls[index] = block
        self._append(block, out)
        return block

    def _append(self, block: _Block, out: list[bytes]) -> None:
        if len(self._blocks) >= MAX_BLOCKS:
            raise ReplicaFailure("garbage", f"more than {MAX_BLOCKS} pieces of text behind a call that does not end")
        self._blocks.append(block)
        self._advance(out)

    def _write(self, block: _Block, text: str, out: list[bytes]) -> None:
        if block.index < 0:
            self._held += len(text)
            if self._held > MAX_HELD:
                raise ReplicaFailure("garbage", f"more than {MAX_HELD} characters behind a call that does not end")
            block.held.append(text)
            return
        self._put(block, text, out)
        if len(self._blocks) > 1:
            self._advance(out)

    def _advance(self, out: list[bytes]) -> None:
        """Begin the first block; as long as it can end and another one waits, end it and begin that."""
        while self._blocks:
            first = self._blocks[0]
            if first.index < 0:
                if not first.may_begin():
                    return
                self._start(first, out)
            if len(self._blocks) == 1 or not first.may_end():
                return
            out.append(_event({"type": "content_block_stop", "index": first.index}))
            first.over = True
            self._blocks.popleft()

    def _start(self, block: _Block, out: list[bytes]) -> None:
        block.index = self._next
        self._next += 1
        out.append(_event({"type": "content_block_start", "index": block.index, "content_block": block.start()}))
        if block.held:
            text = "".join(block.held)
            self._held -= len(text)
            block.held.clear()
            self._put(block, text, out)

    def _put(self, block: _Block, text: str, out: list[bytes]) -> None:
        if block.kind == _TOOL:
            block.end.feed(text)
        out.append(_event({"type": "content_block_delta", "index": block.index, "delta": block.delta(text)}))


def _event(data: dict[str, Any]) -> bytes:
    kind: str = data["type"]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))
