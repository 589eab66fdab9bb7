"""Writes a chat stream as events of Messages.

Clients expect sequential blocks: a block begins when the previous one has ended. Chat has no blocks, and a delta may belong to
any tool call. So blocks wait in a queue, and the first one is open:

    delta ──► its block (a new one at the end) ──► the first block: an event at once; any other: held
    the first has ended, and another one waits ──► content_block_stop, content_block_start, the held text

A text or a thought ends when anything else begins; a call ends when its arguments are a complete JSON object, or with the
stream. A call begins when its name is known (arguments without a name are a failure of the replica). Models write one call
after the other, so in practice nothing is held.

Bounds: MAX_BLOCKS waiting blocks, with MAX_HELD characters. Beyond them: ReplicaFailure.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Final

import orjson

from gateway.dialects.anthropic.errors import error_event, full_context_error
from gateway.dialects.full_context import FullContext
from gateway.dialects.openai.chat_answer import ChatCall, ChatPiece, nameless_call
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError, ReplicaFailure
from gateway.features.translation.messages.answer import call_id, counts_of, ending, message_id, start_of, text_of
from gateway.features.translation.messages.echo import Echo
from gateway.features.translation.translation import EventWriter

MAX_BLOCKS: Final = 1024
MAX_HELD: Final = 4 << 20  # characters

_TEXT, _THINKING, _TOOL = "text", "thinking", "tool_use"
_OUTSIDE: Final = re.compile(r'[{}\[\]"]')
_INSIDE: Final = re.compile(r'["\\]')


class JsonEnd:
    """Detects when a text in pieces is a complete JSON object, if it is JSON at all. O(characters)."""

    __slots__ = ("_depth", "_escaped", "_inside", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._inside = False  # inside a string
        self._escaped = False  # the last character was an escaping backslash

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
    """index: in the message; -1: not begun. call: None: not a tool call. id: of a call that has begun."""

    __slots__ = ("call", "end", "held", "id", "index", "kind", "over")

    def __init__(self, kind: str, call: ChatCall | None = None) -> None:
        self.kind = kind
        self.index = -1
        self.call = call
        self.id = ""
        self.held = list[str]()
        self.end = JsonEnd()
        self.over = False

    def may_begin(self) -> bool:
        return self.call is None or self.call.name != ""

    def may_end(self) -> bool:
        return self.kind != _TOOL or self.end.complete

    def start(self) -> dict[str, Any]:
        if self.call is not None:
            return {"type": _TOOL, "id": self.id, "name": self.call.name, "input": {}}
        return {"type": _TEXT, "text": ""} if self.kind == _TEXT else {"type": _THINKING, "thinking": "", "signature": ""}

    def delta(self, text: str) -> dict[str, Any]:
        if self.kind == _TOOL:
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": "text_delta", "text": text} if self.kind == _TEXT else {"type": "thinking_delta", "thinking": text}


class MessageWriter(EventWriter):
    """Writes one answer."""

    def __init__(self, echo: Echo, estimate: int = 0) -> None:
        self._echo = echo
        self._estimate = estimate  # of the prompt's tokens
        self._id = ""
        self._blocks = deque[_Block]()  # blocks that have not ended
        self._calls = list[_Block]()  # by number
        self._ids = set[str]()  # ids of calls
        self._next = 0  # the index of the next block
        self._held = 0
        self._stop = ""

    def begin(self, chunk: dict[str, Any]) -> bytes:
        self._id = message_id(chunk)
        return _event({"type": "message_start", "message": start_of(chunk, self._id, self._estimate)})

    def delta(self, piece: ChatPiece) -> bytes:
        if self._echo.empty:
            return b""
        out = list[bytes]()
        if piece.reasoning:
            self._write_text(_THINKING, piece.reasoning, out)
        if text := text_of(piece):
            self._write_text(_TEXT, text, out)
        for call, arguments in piece.calls:
            self._call(call, arguments, out)
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
        stop_reason, sequence = ending(reason, self._stop, self._echo, called=any(block.index >= 0 for block in self._calls))
        delta = {"stop_reason": stop_reason, "stop_sequence": sequence}
        out.append(_event({"type": "message_delta", "delta": delta, "usage": counts_of(usage, self._estimate)}))
        out.append(_event({"type": "message_stop"}))
        return b"".join(out)

    def failed(self, message: str, full: FullContext | None = None) -> bytes:
        if full is not None:
            full.complete(self._estimate, None)
            return b"event: error\ndata: %b\n\n" % full_context_error(full, "")
        return error_event(GatewayError(500, "replica_error", message))

    # -- blocks

    def _write_text(self, kind: str, text: str, out: list[bytes]) -> None:
        last = self._blocks[-1] if self._blocks else None
        if last is None or last.kind != kind:
            last = _Block(kind)
            self._append(last, out)
        self._write(last, text, out)

    def _call(self, call: ChatCall, arguments: str, out: list[bytes]) -> None:
        if call.number == len(self._calls):
            self._calls.append(_Block(_TOOL, call))
            self._append(self._calls[-1], out)
        block = self._calls[call.number]
        if block.index < 0:
            self._advance(out)
        if arguments and not block.over:  # otherwise they are complete
            self._write(block, arguments, out)

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
        """Begins the first block. While it can end and another one waits, ends it and begins the next."""
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
        if block.call is not None:
            block.id = call_id(block.call, self._id, self._ids)
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
