"""Writes the events of a response while a chat stream arrives.

    response.created, response.in_progress        with the first chunk
    item by item                                  reasoning, message: one is open at a time, and the next one closes it
                                                  calls: all stay open until the end, because their arguments may alternate
    response.completed or .incomplete             with the chat's [DONE]; or error and response.failed

Texts are stored as the inside of a JSON string. Each is repeated three times at the end of its item, and once at the end of the
response. So a response may collect MAX_COLLECTED bytes; a larger one is a ReplicaFailure. A body is one piece.

The input of a custom tool is written at its end, because its arguments are valid JSON only then.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.dialects.excerpt import one_line
from gateway.dialects.full_context import CODE, FullContext
from gateway.dialects.openai.chat_answer import ChatCall, ChatPiece, nameless_call
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from gateway.features.translation.responses import answer as form
from gateway.features.translation.responses.answer import OUTPUT_TEXT, REFUSAL, CallHead, Identity, ResponseForm, inside
from gateway.features.translation.responses.tools import ToolName, tool_names
from gateway.features.translation.translation import EventWriter, WholeChat

_BLANK: Final = re.compile(rb"(?: |\\[nrt])*")  # white space in a JSON string
MAX_COLLECTED: Final = 4 << 20  # bytes of texts and arguments, as JSON; the longest answers of 2026 have one MiB
MAX_ITEMS: Final = 1024  # and parts of one

_REASONING: Final = "reasoning_text"


class _Item:
    """A message or a reasoning that is open. parts: its finished parts. text: of its last part, of this kind."""

    __slots__ = ("index", "kind", "name", "parts", "text")

    def __init__(self, name: bytes, index: int, kind: str) -> None:
        self.name = name
        self.index = index
        self.kind = kind
        self.parts = list[bytes]()
        self.text = bytearray()

    def json(self, status: bytes) -> bytes:
        """With its finished parts."""
        write = form.reasoning_json if self.kind == _REASONING else form.message_json
        return write(self.name, b",".join(self.parts), status)


class _Call:
    """A call. head: once its name is known; index: of its item, from then on. arguments: the inside of a JSON string."""

    __slots__ = ("arguments", "head", "index")

    def __init__(self) -> None:
        self.head: CallHead | None = None
        self.index = 0
        self.arguments = bytearray()


class ResponseWriter(EventWriter):
    """Writes one response. echo: the part of the request that it repeats. seed: of its ids."""

    def __init__(self, echo: bytes, seed: str = "") -> None:
        super().__init__()
        self._seed = seed
        self._echo = echo
        self._tools: dict[str, ToolName] = tool_names(echo)
        self._form = ResponseForm(Identity({}, seed), echo)
        self._items = list[bytes]()  # by output index; b"": open
        self._open: _Item | None = None
        self._calls = list[_Call]()  # by their numbers
        self._call_ids = set[str]()  # clients match results by these ids, so a duplicate is replaced
        self._latest = 0  # the output index of the item being written
        self._collected = 0
        self._reasoning = 0  # tokens

    def begin(self, chunk: dict[str, Any]) -> bytes:
        self._form = ResponseForm(Identity(chunk, self._seed), self._echo)
        response = self._form.json("in_progress")
        return self._event(b"response.created", b'"response":' + response) + self._event(
            b"response.in_progress", b'"response":' + response
        )

    def counted(self, usage: dict[str, Any]) -> None:
        self._reasoning = form.reasoning_tokens(usage)

    def delta(self, piece: ChatPiece) -> bytes:
        """Raises ReplicaFailure "garbage" for more than one response may have."""
        out = b""
        for kind, text in ((_REASONING, piece.reasoning), (OUTPUT_TEXT, piece.text), (REFUSAL, piece.refusal)):
            if text:
                out += self._text(kind, text)
        if piece.calls:
            out += b"".join([self._call_delta(call, arguments) for call, arguments in piece.calls])
        return out

    def end(self, reason: str, usage: Usage | None) -> bytes:
        out, response = self.ended(reason, usage)
        return out + self._event(b"response." + form.status_of(reason).encode(), b'"response":' + response)

    def ended(self, reason: str, usage: Usage | None) -> tuple[bytes, bytes]:
        """The events before the last one, and the whole response."""
        status = form.status_of(reason)
        out = self._close(status.encode() if self._is_latest(self._open) else b"completed")
        for call in self._calls:
            out += self._close_call(call, status.encode() if call.index == self._latest else b"completed")
        return out, self._form.json(status, b",".join(self._items), form.usage_json(usage, self._reasoning), reason)

    def failed(self, message: str, full: FullContext | None = None) -> bytes:
        """OpenAI's clients raise at `error`, others read `response.failed`."""
        text, kind, code = orjson.dumps(one_line(message)), b"server_error", b"server_error"
        if full is not None:
            kind, code = b"invalid_request_error", CODE.encode()
        error = b'"code":"%b","message":%b,"param":null,"error":{"message":%b,"type":"%b","param":null,"code":"%b"}'
        out = self._event(b"error", error % (code, text, text, kind, code))
        response = self._form.json("failed", error=b'{"code":"%b","message":%b}' % (code, text))
        return out + self._event(b"response.failed", b'"response":' + response)

    # -- texts

    def _text(self, kind: str, text: str) -> bytes:
        """A piece of a text. Opens and closes items and parts as needed."""
        raw, out = self._collect(text), b""
        item = self._open
        if item is None or (item.kind == _REASONING) != (kind == _REASONING):
            out += self._close(b"completed")
            item = self._opened(kind)
            out += self._event(b"response.output_item.added", self._item_fields(item.index, item.json(b"in_progress")))
            out += self._begin_part(item)
        elif item.kind != kind:
            self._require_fewer(len(item.parts) + 1)
            out += self._end_part(item)
            item.kind = kind
            out += self._begin_part(item)
        self._latest = item.index
        item.text += raw
        logprobs = b',"logprobs":[]' if kind == OUTPUT_TEXT else b""
        fields = b'%b,"delta":"%b"%b' % (_place(item), raw, logprobs)
        return out + self._event(b"response.%b.delta" % kind.encode(), fields)

    def _opened(self, kind: str) -> _Item:
        index = self._new_index()
        item = _Item(self._form.identity.item(b"rs" if kind == _REASONING else b"msg", index), index, kind)
        self._open = item
        return item

    def _begin_part(self, item: _Item) -> bytes:
        part = form.part_json(item.kind, b"")
        return self._event(b"response.content_part.added", b'%b,"part":%b' % (_place(item), part))

    def _end_part(self, item: _Item) -> bytes:
        text, place, kind = bytes(item.text), _place(item), item.kind.encode()
        name = b"refusal" if item.kind == REFUSAL else b"text"
        logprobs = b',"logprobs":[]' if item.kind == OUTPUT_TEXT else b""
        part = form.part_json(item.kind, text)
        out = self._event(b"response.%b.done" % kind, b'%b,"%b":"%b"%b' % (place, name, text, logprobs))
        out += self._event(b"response.content_part.done", b'%b,"part":%b' % (place, part))
        item.parts.append(part)
        item.text.clear()
        return out

    def _close(self, status: bytes) -> bytes:
        item = self._open
        if item is None:
            return b""
        self._open = None
        out = self._end_part(item)
        return out + self._done(item.index, item.json(status))

    def _is_latest(self, item: _Item | None) -> bool:
        return item is not None and item.index == self._latest

    # -- calls

    def _call_delta(self, piece: ChatCall, arguments: str) -> bytes:
        if piece.number == len(self._calls):
            self._calls.append(_Call())
        call = self._calls[piece.number]
        out, raw = b"", self._collect(arguments)
        call.arguments += raw
        if call.head is None:
            if not piece.name:
                return b""  # arguments before the name are written with it
            out, raw = self._begin_call(call, piece), bytes(call.arguments)
        self._latest = call.index
        return out + self._arguments(call, raw)

    def _begin_call(self, call: _Call, piece: ChatCall) -> bytes:
        out = self._close(b"completed")
        call.index = self._new_index()
        call_id = "" if piece.id in self._call_ids else piece.id
        self._call_ids.add(call_id)
        head = call.head = CallHead(self._form.identity, call.index, piece.name, call_id, self._tools)
        added = self._item_fields(call.index, head.json(b"", b"in_progress"))
        return out + self._event(b"response.output_item.added", added)

    def _arguments(self, call: _Call, raw: bytes) -> bytes:
        head = call.head
        if not raw or head is None or head.tool.custom:
            return b""
        fields = b'%b,"delta":"%b"' % (_place_of_call(head, call.index), raw)
        return self._event(b"response.function_call_arguments.delta", fields)

    def _close_call(self, call: _Call, status: bytes) -> bytes:
        head = call.head
        if head is None:
            if not call.arguments:
                return b""
            raise nameless_call()
        place, given = _place_of_call(head, call.index), bytes(call.arguments)
        if head.tool.custom:
            given = form.input_of(given)
            out = self._event(b"response.custom_tool_call_input.delta", b'%b,"delta":"%b"' % (place, given))
            out += self._event(b"response.custom_tool_call_input.done", b'%b,"input":"%b"' % (place, given))
        else:
            out = b""
            if _BLANK.fullmatch(given):  # of a tool without parameters; clients parse them, and compare them with the deltas
                given += b"{}"
                out = self._event(b"response.function_call_arguments.delta", b'%b,"delta":"{}"' % place)
            fields = b'%b,"name":%b,"arguments":"%b"' % (place, orjson.dumps(head.tool.name), given)
            out += self._event(b"response.function_call_arguments.done", fields)
        return out + self._done(call.index, head.json(given, status))

    # -- all of them

    def _new_index(self) -> int:
        self._require_fewer(len(self._items))
        self._items.append(b"")
        return len(self._items) - 1

    def _require_fewer(self, parts: int) -> None:
        if parts >= MAX_ITEMS:
            raise ReplicaFailure("garbage", f"an answer of more than {MAX_ITEMS} parts")

    def _collect(self, text: str) -> bytes:
        raw = inside(text)
        self._collected += len(raw)
        if self._collected > MAX_COLLECTED:
            raise ReplicaFailure("garbage", f"an answer of more than {MAX_COLLECTED} bytes")
        return raw

    def _done(self, index: int, item: bytes) -> bytes:
        self._items[index] = item
        return self._event(b"response.output_item.done", self._item_fields(index, item))

    def _item_fields(self, index: int, item: bytes) -> bytes:
        return b'"output_index":%d,"item":%b' % (index, item)

    def _event(self, kind: bytes, fields: bytes) -> bytes:
        """One event, numbered. fields: JSON members."""
        self.last_number += 1
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (kind, kind, fields, self.last_number)


def response_of(body: bytes, echo: bytes, seed: str = "") -> bytes:
    """A whole chat completion as a response. Raises ReplicaFailure "garbage" if it is none."""
    chat, writer = WholeChat(body), ResponseWriter(echo, seed)
    writer.begin(chat.answer)
    if chat.usage:
        writer.counted(chat.answer["usage"])
    writer.delta(chat.message)
    _, response = writer.ended(chat.reason, chat.usage)
    return response


def _place(item: _Item) -> bytes:
    return b'"item_id":"%b","output_index":%d,"content_index":%d' % (item.name, item.index, len(item.parts))


def _place_of_call(head: CallHead, index: int) -> bytes:
    return b'"item_id":"%b","output_index":%d' % (head.item_id, index)
