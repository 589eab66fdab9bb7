r"""Converts the stream of an engine with its own form of chat to OpenAI's format: events for a client, or one whole answer.

    engine's events ── ChatPieces ──► texts, end ── AdaptedReader ──► chat.completion.chunk events ──► the client's dialect
                       (stop strings end it)                          collected: one chat.completion ──► the client's dialect

Distributed-Llama's events: `object` is chat.completion, all ids are equal, `\r\n\r\n` ends them, the last one always has
`finish_reason` "stop" and no delta, and `data: [DONE]` has no line end. It reports no usage. A cut answer is guessed: it has as
many pieces as tokens were allowed. A piece is usually one token. If some pieces have several tokens (parts of one character, or
of a possible end), a cut answer has fewer pieces, and counts as complete.

Pure: bytes in, bytes out. Any division of the stream into chunks gives the same texts.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Answers, OuterReader, StreamReader
from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.events.splitter import Splitter
from gateway.dialects.events.sse import MAX_PARSED_EVENT, data_of
from gateway.dialects.openai.stream import ChunkReader, first_event
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from gateway.features.translation.adaptation.request import PlainChat
from gateway.features.translation.adaptation.stops import StopFilter

_ROLE: Final = {"role": "assistant", "content": ""}


class ChatPieces:
    """Parses the engine's stream. over: no more input is needed. reason: why it ended, "" before. created: its time, 0 before
    the first event.
    """

    __slots__ = ("_limit", "_pieces", "_splitter", "_stops", "created", "over", "reason")

    def __init__(self, chat: PlainChat) -> None:
        self._splitter = Splitter()
        self._stops = StopFilter(chat.stops)
        self._limit = chat.max_tokens
        self._pieces = 0
        self.created = 0
        self.reason = ""
        self.over = False

    def feed(self, chunk: bytes) -> str:
        """The text that is certain now. Raises ReplicaFailure for invalid input."""
        texts = list[str]()
        for event in self._splitter.feed(chunk):
            texts.append(self._event(event))
        if self._splitter.held > MAX_PARSED_EVENT:
            raise _garbage(f"an event of more than {MAX_PARSED_EVENT} bytes")
        return "".join(texts)

    def finish(self) -> str:
        """Ends the stream; the last event may be incomplete."""
        text = self._event(self._splitter.finish())
        self.over = self.over or self.reason != ""
        return text

    def _event(self, event: bytes) -> str:
        data = data_of(event).strip()
        if self.over or not data:
            return ""
        if data == b"[DONE]":
            if not self.reason:
                raise _garbage("the stream ends without a finish_reason")
            self.over = True
            return ""
        choice = self._choice(data)
        delta, reason = choice.get("delta"), choice.get("finish_reason")
        text = delta.get("content") if isinstance(delta, dict) else None
        out = ""
        if isinstance(text, str) and text and not self.reason:
            self._pieces += 1
            out = self._stops.feed(text)
            if self._stops.stopped:
                self.reason, self.over = "stop", True
        if isinstance(reason, str) and reason and not self.reason:
            out += self._stops.finish()
            self.reason = "length" if self._limit and self._pieces >= self._limit else "stop"
        return out

    def _choice(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise _garbage("an event whose data is no JSON") from error
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise _garbage("an event without choices")
        created = chunk.get("created")
        if not self.created and type(created) is int and 0 < created < 1 << 40:
            self.created = created
        choice: dict[str, Any] = choices[0]
        return choice


class AdaptedReader(OuterReader):
    """Reads the stream for a client that wants a stream. inner: the reader of its dialect."""

    def __init__(self, chat: PlainChat, inner: StreamReader, id_: str) -> None:
        super().__init__(inner)
        self._pieces = ChatPieces(chat)
        self._model = chat.model
        self._id = id_
        self._begun = False

    def feed(self, chunk: bytes) -> bytes:
        return self._passed(self._pieces.feed(chunk))

    def finish(self) -> bytes:
        out = self._passed(self._pieces.finish())
        rest = self.inner.finish()
        self._noted()
        return out + rest

    def _passed(self, text: str) -> bytes:
        if self.inner.done:
            return b""
        events = list[bytes]()
        if not self._begun:
            self._begun = True
            events.append(self._chunk(_ROLE, None))
        if text:
            events.append(self._chunk({"content": text}, None))
        if self._pieces.over:
            events += (self._chunk({}, self._pieces.reason), b"data: [DONE]\n\n")
        out = self.inner.feed(b"".join(events))
        self._noted()
        return out

    def _noted(self) -> None:
        self.note()
        self.within_event, self.holds = self.inner.within_event, self.inner.holds
        self.enough = self._pieces.over and self.done

    def _chunk(self, delta: dict[str, str], reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {"id": self._id, "object": "chat.completion.chunk", "created": self._pieces.created, "model": self._model}
        return b"data: " + orjson.dumps({**chunk, "choices": [choice]}) + b"\n\n"


class AdaptedAnswers(Answers):
    """The answers to one adapted request. inner: reads a chat answer for the client."""

    def __init__(self, chat: PlainChat, inner: Answers, seed: str) -> None:
        self.translated = inner.translated
        self.collects = True
        self.chat = chat
        self.inner = inner
        self._id = f"chatcmpl-{seed}"

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return AdaptedReader(self.chat, self.inner.reader(api, watchful=watchful), self._id)

    def first_event(self, begin: bytes) -> FirstEvent | None:
        return first_event(begin)

    def usage_of(self, body: bytes) -> Usage | None:
        return None

    def collecting(self) -> StreamReader:
        return AdaptedReader(self.chat, ChunkReader(strip_usage=False), self._id)

    def whole(self, body: bytes) -> bytes:
        return self.inner.whole(body)

    def error(self, status: int, body: bytes) -> bytes:
        return self.inner.error(status, body)


def _garbage(text: str) -> ReplicaFailure:
    return ReplicaFailure("garbage", text)
