"""Answers as they are stored: an element of a later body, and its entries. Pure. O(length).

A plain answer is stored as the engine wrote it, without nulls. A stream is stored from its value (`finished_answer.py`), in the
form of a plain answer. Readable reasoning is stored with it, and so replayed whether the client keeps it or not.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

from gateway.dialects import finished_answer as value
from gateway.dialects.finished_answer import FinishedAnswer
from gateway.dialects.json_structure import exceeds
from gateway.features.prompt_log.naming.answers import MAX_VALUES
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chat import message_entry
from gateway.features.prompt_log.naming.entries import Entry, OpenCalls, object_in
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES
from gateway.features.prompt_log.naming.messages import message_entries
from gateway.features.prompt_log.naming.responses import item_entries

COMPLETED, INCOMPLETE = "completed", "incomplete"
_EMPTY: Final[tuple[Any, ...]] = (None, [])


class AnswerTurn(NamedTuple):
    """output: an element of a list of turns, JSON. entries: its own. open: ids of the calls without a result after it."""

    output: bytes
    entries: list[Entry]
    open: list[str]


def plain_answer(body: bytes, form: str, open_: tuple[str, ...]) -> AnswerTurn:
    """A whole plain answer of chat or Messages. open_: before it. Raises NoNameError."""
    if len(body) > value.MAX_ANSWER or exceeds(body, MAX_VALUES):
        raise NoNameError("the answer is too large")
    try:
        answer = object_in(orjson.loads(body), "the answer")
        if form == MESSAGES:
            blocks = [_pruned(block) for block in answer["content"]]
            return _turn({"role": "assistant", "content": blocks}, form, open_)
        message = object_in(answer["choices"][0]["message"], "the message")
        kept = {name: member for name, member in message.items() if name == "content" or member not in _EMPTY}
        return _turn({**kept, "role": "assistant"}, form, open_)
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise NoNameError("the answer has another form") from None


def streamed_answer(answer: FinishedAnswer, form: str, open_: tuple[str, ...]) -> AnswerTurn:
    """A whole streamed answer of chat or Messages. open_: before it. Raises NoNameError."""
    if form == MESSAGES:
        if answer.foreign:
            raise NoNameError("the answer has blocks that are not read in a stream")
        return _turn({"role": "assistant", "content": [_block(part) for part in answer.parts]}, form, open_)
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    for part in answer.parts:
        if part.kind in (value.REASONING, value.REFUSAL):
            message[part.name or part.kind] = part.text
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}} for part in answer.calls
    ]
    return _turn(message | ({"tool_calls": calls} if calls else {}), form, open_)


def response_answer(output: bytes, open_: tuple[str, ...]) -> AnswerTurn:
    """The items of a whole response, JSON joined by commas. open_: before it. Raises NoNameError."""
    if exceeds(output, MAX_VALUES):
        raise NoNameError("the answer is too large")
    calls = OpenCalls(open_)
    entries = item_entries(orjson.loads(b"[%b]" % output), calls)
    return AnswerTurn(output, entries, calls.ids)


def _turn(message: dict[str, Any], form: str, open_: tuple[str, ...]) -> AnswerTurn:
    try:
        output = orjson.dumps(message)
    except orjson.JSONEncodeError:
        raise NoNameError("the answer is nested too deeply") from None
    if len(output) > value.MAX_ANSWER or exceeds(output, MAX_VALUES):
        raise NoNameError("the answer is too large")
    calls = OpenCalls(open_)
    entries = [message_entry(message, calls)] if form == CHAT else message_entries(message, calls)
    return AnswerTurn(output, entries, calls.ids)


def _pruned(block: Any) -> dict[str, Any]:
    return {name: member for name, member in object_in(block, "a block").items() if member is not None}


def _block(part: value.AnswerPart) -> dict[str, Any]:
    """A part of a streamed message as a block."""
    if part.kind == value.TEXT:
        return {"type": "text", "text": part.text}
    if part.kind == value.REASONING:
        signed = {"signature": part.signature} if part.signature else {}
        return {"type": "thinking", "thinking": part.text, **signed}
    if part.kind == value.SEALED:
        return {"type": part.name, "data": part.text}
    if exceeds(bytes(part.written), MAX_VALUES):
        raise NoNameError("the arguments have too many values")
    try:
        arguments = orjson.loads(part.written)
    except orjson.JSONDecodeError:
        raise NoNameError("the arguments of a call are no JSON") from None
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}
