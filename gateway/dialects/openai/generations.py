"""OpenAI's chat and completions as dialects."""

from __future__ import annotations

from typing import ClassVar

import orjson

from gateway.dialects.answer import UsageTail, usage_of
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import AnswerTail, Continuation, Dialect, StreamReader
from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.events.sse import comment
from gateway.dialects.excerpt import replica_error
from gateway.dialects.finished_answer import AnswerAssembler
from gateway.dialects.full_context import FullContext
from gateway.dialects.openai.chat_answer import ChatAssembler
from gateway.dialects.openai.continuation import TextContinuation
from gateway.dialects.openai.errors import error_body, event_error_of, full_context_error
from gateway.dialects.openai.request import CHAT, COMPLETION, GUESS, parse
from gateway.dialects.openai.stream import ChunkReader, SeveralReader, first_event, is_opening
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.stream_forms import chunks_of
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError


class GenerationBody(Dialect):
    """The common part of chat and completions. name: the kind of body, for `request.parse`."""

    pulsed: ClassVar[bool] = True

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        return parse(self.name, raw, most)

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        if api.answers > 1:
            return SeveralReader(api.answers, strip_usage=api.strip_usage, watchful=watchful)
        return ChunkReader(strip_usage=api.strip_usage, watchful=watchful)

    def first_event(self, begin: bytes) -> FirstEvent | None:
        return first_event(begin)

    def usage_of(self, body: bytes) -> Usage | None:
        return usage_of(body, parse_usage)

    def answer_tail(self, begin: bytes) -> AnswerTail | None:
        return UsageTail(begin, parse_usage)

    def is_opening(self, event: bytes) -> bool:
        return is_opening(event)

    def pulse(self, words: str, *, event: bool = False) -> bytes:
        return comment(words)

    def streamed(self, api: ApiRequest, body: bytes) -> bytes:
        return chunks_of(body, strip_usage=api.strip_usage)

    def assembler(self) -> AnswerAssembler:
        return ChatAssembler()

    def error_body(self, error: GatewayError, request_id: str = "") -> bytes:
        return error_body(error)

    def replica_error(self, status: int, body: bytes) -> GatewayError:
        return replica_error(status, body, whole=True)

    def full_context_error(self, full: FullContext, body: bytes, request_id: str) -> bytes:
        return full_context_error(full, body)

    def error_event(self, error: GatewayError, reader: StreamReader | None) -> bytes | None:
        """The error, then [DONE], as vLLM writes it."""
        return b"data: " + orjson.dumps(event_error_of(error)) + b"\n\ndata: [DONE]\n\n"


class ChatBody(GenerationBody):
    name: ClassVar[str] = CHAT
    continuation: ClassVar[Continuation | None] = TextContinuation(CHAT)


class Completion(GenerationBody):
    name: ClassVar[str] = COMPLETION
    continuation: ClassVar[Continuation | None] = TextContinuation(COMPLETION)


class DryRun(GenerationBody):
    """A chat or a completion, decided by the body: for a dry run, whose path is the same for both."""

    name: ClassVar[str] = GUESS
