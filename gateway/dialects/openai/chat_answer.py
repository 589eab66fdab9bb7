"""The answers of chat and completions, read in the same way from a body and from a stream, in each form that engines write.

    message of a body, delta of a chunk ── ChatPieceReader ──► ChatPiece ──┬── ChatAssembler ──► FinishedAnswer
                                                                            └── writers of other dialects (translation)

`content` may be a list of parts (Mistral), reasoning has two names, the arguments of a call may be an object, calls may have no
indexes. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.dialects.dialect import ended_without_done
from gateway.dialects.events.sse import data_of
from gateway.dialects.finished_answer import (
    CALL,
    MAX_ANSWER,
    MAX_NAME,
    REASONING,
    REFUSAL,
    TEXT,
    AnswerAssembler,
    UnreadableAnswerError,
    object_in,
    text_in,
)
from gateway.dialects.openai.usage import parse_usage
from gateway.errors import ReplicaFailure

MAX_CALLS: Final = 1024  # of tools, in an answer

_REASONING_CONTENT: Final = "reasoning_content"
_REASONING: Final = ("reasoning", _REASONING_CONTENT)  # some engines write both; the first one counts, as in a log
_TOKEN: Final = 36  # bytes of a token's id


class ChatCall:
    """A call of a tool, as far as it is known. id: the engine's, "" without one of a reasonable length. number: from 0."""

    __slots__ = ("id", "name", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.id = ""
        self.name = ""


class ChatPiece:
    """A piece of an answer. calls: each with the piece of its arguments. reasoning_name: the engine's, of the member."""

    __slots__ = ("calls", "reasoning", "reasoning_name", "refusal", "text")

    def __init__(self, text: str, refusal: str) -> None:
        self.text = text
        self.refusal = refusal
        self.reasoning = ""
        self.reasoning_name = ""
        self.calls: Sequence[tuple[ChatCall, str]] = ()


class ChatPieceReader:
    """Reads the messages or deltas of one answer. They may have anything in them. calls: of tools, in their order."""

    def __init__(self) -> None:
        self.calls = list[ChatCall]()
        self._by_index = dict[int, ChatCall]()  # the last one of each index

    def read(self, message: dict[str, Any], *, whole: bool = False) -> ChatPiece:
        """whole: not a delta. Raises ReplicaFailure for more than one answer may have, and for a nameless call."""
        content = message.get("content")
        thoughts = list[str]()
        text = _in_parts(content, thoughts) if isinstance(content, list) else text_in(message, "content")
        piece = ChatPiece(text, text_in(message, "refusal"))
        for name in _REASONING:
            if found := text_in(message, name):
                piece.reasoning, piece.reasoning_name = found, name
                break
        if thought := "".join(thoughts):
            piece.reasoning, piece.reasoning_name = thought, _REASONING_CONTENT
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            piece.calls = self._calls(calls, whole=whole)
        return piece

    def _calls(self, calls: list[Any], *, whole: bool) -> list[tuple[ChatCall, str]]:
        found = list[tuple[ChatCall, str]]()
        for number, given in enumerate(calls):
            function = given.get("function") if isinstance(given, dict) else None
            if not isinstance(function, dict):
                continue
            name, arguments = text_in(function, "name"), _arguments(function)
            if len(name) > MAX_NAME:
                raise ReplicaFailure("garbage", f"the name of a tool with more than {MAX_NAME} characters")
            if whole and not name:
                if arguments:
                    raise nameless_call()
                continue
            if whole and function.get("arguments") is None:
                arguments = "{}"
            call = self._call(number if whole else given.get("index"), text_in(given, "id"), name)
            call.name = call.name or name
            found.append((call, arguments))
        return found

    def _call(self, index: Any, id_: str, name: str) -> ChatCall:
        """The call that a piece belongs to. Some engines have no indexes, or the same for all calls: a name with another id is
        another call, and so is one with neither index nor id. (Some give each delta a new id, but the name only once.)
        """
        if not isinstance(index, int) or isinstance(index, bool):
            index = -1
        if len(id_) > MAX_NAME:
            id_ = ""
        call = self._by_index.get(index)
        if call is None or (name and call.name and (id_ != call.id if id_ else index == -1)):
            if len(self.calls) >= MAX_CALLS:
                raise ReplicaFailure("garbage", f"more than {MAX_CALLS} calls of tools in an answer")
            call = self._by_index[index] = ChatCall(len(self.calls))
            self.calls.append(call)
        call.id = call.id or id_
        return call


class ChatAssembler(AnswerAssembler):
    """Assembles the first choice of a chat or a completion. created: its time, 0 without one."""

    def __init__(self) -> None:
        super().__init__()
        self.created = 0
        self._messages = ChatPieceReader()

    def event(self, event: bytes) -> None:
        text = data_of(event).strip()
        if text == b"[DONE]":
            self.value.done = True
        elif text:
            self.chunk(object_in(text), text)

    def chunk(self, chunk: dict[str, Any], text: bytes) -> None:
        """text: the same as JSON."""
        if chunk.get("error") or chunk.get("object") == "error":
            self.failed()
        else:
            self._read(chunk, whole=False)

    def body(self, answer: dict[str, Any]) -> None:
        if not self._read(answer, whole=True):
            raise UnreadableAnswerError

    def _read(self, answer: dict[str, Any], *, whole: bool) -> bool:
        """Read an answer or a chunk; returns whether it has the first choice."""
        value = self.value
        self.head(answer)
        value.usage = parse_usage(answer) or value.usage
        created = answer.get("created")
        self.created = created if isinstance(created, int) else self.created
        choice = first_choice(answer)
        if choice is None or not (whole or is_first(choice)):
            return False
        if message := message_in(choice):
            self._add(message, whole=whole)
        elif text := text_in(choice, "text"):  # a completion
            self.write(self.part(1, 0, TEXT), text)
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self.hold(_TOKEN * len(ids))
            value.token_ids += [each for each in ids if isinstance(each, int)]
        if reason := text_in(choice, "finish_reason"):
            self.end(reason, stop_text(choice))
        return True

    def _add(self, message: dict[str, Any], *, whole: bool) -> None:
        try:
            piece = self._messages.read(message, whole=whole)
        except ReplicaFailure as failure:
            raise UnreadableAnswerError from failure
        for place, kind, text in ((0, REASONING, piece.reasoning), (1, TEXT, piece.text), (2, REFUSAL, piece.refusal)):
            if text:
                part = self.part(place, 0, kind)
                part.name = piece.reasoning_name if kind == REASONING else ""
                self.write(part, text)
        for call, arguments in piece.calls:
            part = self.part(3, call.number, CALL)
            self.name(part, call.id, call.name)
            self.write(part, arguments)


def collected_body(assembler: ChatAssembler) -> bytes:
    """The first choice of a stream as a whole chat answer. Raises ReplicaFailure if it is incomplete or too large."""
    answer = assembler.answer()
    if answer is None:
        raise ReplicaFailure("garbage", f"an answer of more than {MAX_ANSWER} bytes")
    if not answer.finish_reason:
        raise ended_without_done()
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    calls = [part for part in answer.parts if part.kind == CALL]
    if calls:
        message["tool_calls"] = [
            {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}} for part in calls
        ]
    for part in answer.parts:
        if part.kind in (REASONING, REFUSAL):
            message[part.name or part.kind] = part.text
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    head = {"id": answer.id, "object": "chat.completion", "created": assembler.created, "model": answer.model}
    return orjson.dumps({**head, "choices": [choice]})


def first_choice(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) else None


def is_first(choice: Mapping[str, Any]) -> bool:
    """Return whether a choice is the first one."""
    return choice.get("index") in (None, 0)


def message_in(choice: Mapping[str, Any]) -> dict[str, Any] | None:
    """The delta; some engines stream one chunk, which is written like a whole answer."""
    for name in ("delta", "message"):
        message = choice.get(name)
        if isinstance(message, dict):
            return message
    return None


def stop_text(choice: Mapping[str, Any]) -> str:
    """The stop sequence that a choice names as what ended it: vLLM's and SGLang's fields, which may hold a token's id, too."""
    return text_in(choice, "stop_reason") or text_in(choice, "matched_stop")


def nameless_call() -> ReplicaFailure:
    return ReplicaFailure("garbage", "the answer has a tool call without a name")


def _in_parts(content: list[Any], thoughts: list[str]) -> str:
    """The text of a content in parts. thoughts: the texts of Mistral's thinking parts are appended to it. Parts of other types,
    such as references, have no text in other dialects and are left out.
    """
    texts = list[str]()
    for part in content:
        if isinstance(part, dict):
            texts.append(text_in(part, "text"))
            inner = part.get("thinking")
            thoughts += [text_in(each, "text") for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []
            thoughts.append(text_in(part, "thinking"))
    return "".join(texts)


def _arguments(function: Mapping[str, Any]) -> str:
    """A text of JSON, or a piece of one; some engines give the object. Raises ReplicaFailure."""
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return arguments if isinstance(arguments, str) else ""
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError as error:
        raise ReplicaFailure("garbage", "the arguments of a tool are nested too deeply") from error
