"""OpenAI's Responses as a dialect, and the paths of stored responses below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import orjson

from gateway.dialects.answer import UsageTail, usage_of
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.body import json_object, model_of, named_adapter, output_limit, salt_of, session_of, wants_stream
from gateway.dialects.dialect import AnswerTail, Dialect, StreamReader, cannot_count
from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.events.named import first_event, name_of
from gateway.dialects.events.sse import comment
from gateway.dialects.excerpt import replica_error
from gateway.dialects.finished_answer import AnswerAssembler
from gateway.dialects.full_context import FullContext
from gateway.dialects.openai.errors import error_body, event_error_of, full_context_error
from gateway.dialects.passthrough import PassThrough
from gateway.dialects.responses.ids import id_in, path_id, refers
from gateway.dialects.responses.prompt import has_context, responses_prompt, runs_tools
from gateway.dialects.responses.response_answer import ResponseAssembler
from gateway.dialects.responses.stream import QUIET, ResponseReader, failure_of
from gateway.dialects.responses.usage import parse_usage
from gateway.dialects.steering import steers
from gateway.dialects.stream_forms import response_events
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError, bad_request

_KEEPALIVE: Final = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'  # Codex ignores types that it does not know
_LIMITS: Final[tuple[str, ...]] = ("max_output_tokens",)


class Responses(Dialect):
    """POST /v1/responses."""

    name: ClassVar[str] = "responses"
    translatable: ClassVar[bool] = True
    in_background: ClassVar[bool] = True
    pulsed: ClassVar[bool] = True

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        body = json_object(raw)
        model, stream = model_of(body), wants_stream(body)
        _require_flags(body)
        prompt = responses_prompt(body, most)
        api = ApiRequest(model, prompt.joined(), salt_of(body), stream=stream, metered=True, body=raw)
        api.breakpoints, api.images = prompt.breakpoints(), prompt.images
        api.references, api.textual, api.steers = prompt.refers, prompt.textual, steers(body)
        api.adapter = named_adapter(body)
        api.countable = not (prompt.refers or has_context(body) or runs_tools(body) or body.get("truncation") == "auto")
        api.stores = body.get("background") is True
        api.session, api.output = session_of(body), output_limit(body, _LIMITS)
        api.refers, api.keeps = refers(body), body.get("store") is not False
        return api

    def may_store(self, api: ApiRequest, path: str) -> bool:
        """True for background responses, which would run twice. (A response stored under an unknown id does no harm.)"""
        return bool(api.stores)

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return ResponseReader()

    def object_in(self, begin: bytes) -> str:
        return id_in(begin)

    def first_event(self, begin: bytes) -> FirstEvent | None:
        return first_event(begin, failure_of)

    def usage_of(self, body: bytes) -> Usage | None:
        return usage_of(body, parse_usage)

    def answer_tail(self, begin: bytes) -> AnswerTail | None:
        return UsageTail(begin, parse_usage)

    def is_opening(self, event: bytes) -> bool:
        return name_of(event) in QUIET

    def pulse(self, words: str, *, event: bool = False) -> bytes:
        return _KEEPALIVE if event else comment(words)

    def streamed(self, api: ApiRequest, body: bytes) -> bytes:
        return response_events(body)

    def assembler(self) -> AnswerAssembler | None:
        return ResponseAssembler() if self.makes_objects else None

    def error_body(self, error: GatewayError, request_id: str = "") -> bytes:
        return error_body(error)

    def replica_error(self, status: int, body: bytes) -> GatewayError:
        return replica_error(status, body, whole=True)

    def full_context_error(self, full: FullContext, body: bytes, request_id: str) -> bytes:
        return full_context_error(full, body)

    def error_event(self, error: GatewayError, reader: StreamReader | None) -> bytes | None:
        return _error_event(error, reader)


def _require_flags(body: Mapping[str, Any]) -> None:
    """Raises GatewayError 400 if a flag is no boolean: the text "false" would be true."""
    for name in ("store", "background"):
        value = body.get(name)
        if not (value is None or isinstance(value, bool)):
            raise bad_request(f"'{name}' must be true or false.", name)


class CompactResponses(Responses):
    """POST /v1/responses/compact. Its answer is not stored: the client sends its items itself."""

    name: ClassVar[str] = "compact_responses"
    translatable: ClassVar[bool] = False
    makes_objects: ClassVar[bool] = False
    in_background: ClassVar[bool] = False
    pulsed: ClassVar[bool] = False
    lacking: ClassVar[str] = (
        "No replica that is up can compact a history: most engines cannot. Ask for a summary (POST /v1/responses), and begin a"
        " new conversation with that."
    )

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        api = super().parse(raw, most)
        api.keeps = False
        return api


class CountResponseTokens(Responses):
    """POST /v1/responses/input_tokens: generates nothing, and puts nothing into a cache."""

    name: ClassVar[str] = "count_response_tokens"
    translatable: ClassVar[bool] = False
    makes_objects: ClassVar[bool] = False
    in_background: ClassVar[bool] = False
    pulsed: ClassVar[bool] = False
    lacking: ClassVar[str] = cannot_count("Responses", "/v1/responses")

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        api = super().parse(raw, most)
        api.size = len(api.prompt or b"")  # for an estimate
        api.prompt, api.metered, api.stream, api.harmless, api.keeps = None, False, False, True, False
        return api


class StoredResponses(PassThrough):
    """Paths below /v1/responses: GET, DELETE, cancel, input_items, and paths without a dialect of their own."""

    name: ClassVar[str] = "stored_responses"
    kept_here: ClassVar[bool] = True

    def refers(self, path: str) -> str:
        return path_id(path)

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return ResponseReader()

    def error_event(self, error: GatewayError, reader: StreamReader | None) -> bytes | None:
        return _error_event(error, reader)


class Conversations(PassThrough):
    """/v1/conversations, and the paths below it."""

    name: ClassVar[str] = "conversations"
    kept_here: ClassVar[bool] = True

    def refers(self, path: str) -> str:
        return path_id(path)


def _error_event(error: GatewayError, reader: StreamReader | None) -> bytes:
    """OpenAI's servers send `error`, and its clients raise at it; the flat fields are from OpenAI's documentation."""
    number = reader.last_number + 1 if reader else 0
    data: dict[str, Any] = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    data |= {"sequence_number": number, **event_error_of(error)}
    return b"event: error\ndata: " + orjson.dumps(data) + b"\n\n"
