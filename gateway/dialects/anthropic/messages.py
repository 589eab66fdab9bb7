"""Anthropic's Messages as a dialect, and the counting of tokens beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from gateway.dialects.answer import UsageTail, usage_of
from gateway.dialects.anthropic import errors
from gateway.dialects.anthropic.answer_edits import MessageEditor
from gateway.dialects.anthropic.billing import billing_edits, needs_scan
from gateway.dialects.anthropic.breakpoints import may_mark, require_breakpoints
from gateway.dialects.anthropic.cache_split import marked_in
from gateway.dialects.anthropic.diagnosis import compared, field_removal, previous_message
from gateway.dialects.anthropic.message_answer import MessageAssembler
from gateway.dialects.anthropic.prompt import head_digests, messages_prompt, runs_tools
from gateway.dialects.anthropic.sessions import user_session
from gateway.dialects.anthropic.stream import OPENING, MessageReader
from gateway.dialects.anthropic.usage import parse_usage
from gateway.dialects.api_request import ApiRequest, NeedsHelper
from gateway.dialects.body import json_object, model_of, named_adapter, output_limit, salt_of, session_of, wants_stream
from gateway.dialects.diagnosis import Diagnosis, Fingerprint
from gateway.dialects.dialect import AnswerEditor, AnswerTail, Dialect, StreamReader, cannot_count
from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.events.named import first_event, name_of
from gateway.dialects.finished_answer import AnswerAssembler
from gateway.dialects.full_context import FullContext
from gateway.dialects.json_edits import Edit, read_object
from gateway.dialects.passthrough import PassThrough
from gateway.dialects.prompt.canonical import CanonicalPrompt
from gateway.dialects.steering import steers
from gateway.dialects.stream_forms import message_events
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError
from router import Prompt

_SCANNED_AT_ONCE: Final = 1 << 12  # bytes that the event loop may scan, turn by turn
_LIMITS: Final[tuple[str, ...]] = ("max_tokens",)
_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'


class Messages(Dialect):
    """POST /v1/messages."""

    name: ClassVar[str] = "messages"
    translatable: ClassVar[bool] = True
    adds_cached: ClassVar[bool] = True
    pulsed: ClassVar[bool] = True
    id_header: ClassVar[bytes] = b"Request-Id"

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        body = json_object(raw)
        model, stream = model_of(body), wants_stream(body)
        prompt = messages_prompt(body, most)
        api = ApiRequest(model, prompt.joined(), salt_of(body), stream=stream, metered=True, body=raw)
        api.breakpoints, api.images = prompt.breakpoints(), prompt.images
        if may_mark(raw):
            require_breakpoints(body)
        api.countable, api.textual, api.steers = not runs_tools(body), prompt.textual, steers(body)
        api.adapter = named_adapter(body)
        api.billing = _billing(raw, body, most)
        api.prewarm = _prewarm(raw, body, most)
        api.diagnosis = _diagnosis(raw, body, prompt, most)
        api.session, api.output = user_session(body.get("metadata")) or session_of(body), output_limit(body, _LIMITS)
        return api

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return MessageReader()

    def first_event(self, begin: bytes) -> FirstEvent | None:
        return first_event(begin, errors.failure_of)

    def usage_of(self, body: bytes) -> Usage | None:
        return usage_of(body, parse_usage)

    def answer_tail(self, begin: bytes) -> AnswerTail | None:
        return UsageTail(begin, parse_usage)

    def is_opening(self, event: bytes) -> bool:
        return name_of(event) == OPENING

    def pulse(self, words: str, *, event: bool = False) -> bytes:
        return _PING

    def streamed(self, api: ApiRequest, body: bytes) -> bytes:
        return message_events(body)

    def assembler(self) -> AnswerAssembler | None:
        return MessageAssembler()

    def compared(self, before: Fingerprint | None, now: Fingerprint) -> bytes:
        return compared(before, now)

    def editor(self, api: ApiRequest, prompt: Prompt, *, caches: bool, diagnoses: bool) -> AnswerEditor | None:
        marked, silent = marked_in(prompt) if caches else None, bool(api.prewarm)
        told = api.diagnosis.told if api.diagnosis and diagnoses else b""
        return MessageEditor(marked, silent=silent, diagnosis=told) if marked or silent or told else None

    def error_body(self, error: GatewayError, request_id: str = "") -> bytes:
        return errors.error_body(error, request_id)

    def full_context_error(self, full: FullContext, body: bytes, request_id: str) -> bytes:
        return errors.full_context_error(full, request_id)

    def error_event(self, error: GatewayError, reader: StreamReader | None) -> bytes | None:
        return errors.error_event(error)


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: nothing is generated, and nothing remains in a cache."""

    name: ClassVar[str] = "count_tokens"
    translatable: ClassVar[bool] = False
    pulsed: ClassVar[bool] = False
    lacking: ClassVar[str] = cannot_count("Messages", "/v1/messages")

    def assembler(self) -> AnswerAssembler | None:
        return None

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        api = super().parse(raw, most)
        api.size = len(api.prompt or b"")  # for an estimate
        api.prompt, api.metered, api.stream, api.harmless = None, False, False, True
        api.prewarm = []
        return api


class OtherMessages(PassThrough):
    """Paths below /v1/messages without a dialect of their own, such as /v1/messages/batches."""

    name: ClassVar[str] = "other_messages"
    id_header: ClassVar[bytes] = b"Request-Id"

    def error_body(self, error: GatewayError, request_id: str = "") -> bytes:
        return errors.error_body(error, request_id)

    def error_event(self, error: GatewayError, reader: StreamReader | None) -> bytes | None:
        return errors.error_event(error)


def _billing(raw: bytes, body: Mapping[str, Any], most: int) -> list[Edit]:
    if most and len(raw) > _SCANNED_AT_ONCE and needs_scan(raw):
        raise NeedsHelper
    return billing_edits(raw, body)


def _prewarm(raw: bytes, body: Mapping[str, Any], most: int) -> list[Edit]:
    """The edit for `max_tokens: 0`, which computes the prompt only. Most engines refuse it: they are asked for one token."""
    wanted = body.get("max_tokens")
    if wanted != 0 or type(wanted) is not int:
        return []
    if most and len(raw) > _SCANNED_AT_ONCE:
        raise NeedsHelper
    start, end = read_object(raw).spans["max_tokens"]
    return [(start, end, b"1")]


def _diagnosis(raw: bytes, body: dict[str, Any], prompt: CanonicalPrompt, most: int) -> Diagnosis | None:
    previous = previous_message(body)
    if previous is None:
        return None
    if most and len(raw) > _SCANNED_AT_ONCE:
        raise NeedsHelper
    return Diagnosis(previous, head_digests(prompt, body, salt_of(body)), field_removal(raw))
