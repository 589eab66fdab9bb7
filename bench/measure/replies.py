"""Answers of the mock replicas, as wire bytes: the same words and counts in the three dialects.

A stream is `begin` (events before the first word), one `word` after the other, and `end`. All words are the same bytes, because
formatting each of them would cost more; so the events of Responses all have one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from bench.measure.answer import DONE, WORD

WORDS: Final = 40  # of an answer that is not streamed
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
CHAT: Final = b"/v1/chat/completions"
COMPLETIONS: Final = b"/v1/completions"
MESSAGES: Final = b"/v1/messages"
RESPONSES: Final = b"/v1/responses"

_PROMPT: Final = 500  # tokens
_CACHED: Final = 256
_LAST_CHUNK: Final = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Replies:
    """The answers on one path. plain: the whole response. end: of a stream, by its number of words, and by whether usage is
    requested.
    """

    plain: bytes
    begin: bytes
    word: bytes
    end: Callable[[int, bool], bytes]


def response(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (status, kind, len(body), body)


def _chunk(*events: bytes) -> bytes:
    """Each event as an HTTP chunk."""
    return b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)


def _named(kind: bytes, rest: bytes = b"") -> bytes:
    return b'event: %s\ndata: {"type":"%s"%s}\n\n' % (kind, kind, rest)


# -- chat

_USAGE: Final = (
    b'"usage":{"prompt_tokens":500,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":256}}'
)
_ANSWER: Final = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"%s"},"finish_reason":"stop"}],%s}'
) % (WORD * WORDS, _USAGE % (WORDS, _PROMPT + WORDS))
_EVENT: Final = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % WORD
_LAST_EVENT: Final = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


def _chat_end(words: int, usage: bool) -> bytes:
    counts = [b'data: {"id":"c","choices":[],%s}\n\n' % (_USAGE % (words, _PROMPT + words))] if usage else []
    return _chunk(_LAST_EVENT, *counts, DONE + b"\n\n") + _LAST_CHUNK


# -- Messages

_COUNTS: Final = (
    b'"usage":{"input_tokens":244,"cache_creation_input_tokens":0,"cache_read_input_tokens":256,"output_tokens":%d}'
)
_MESSAGE: Final = (
    b'{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[%s],"stop_reason":%s,"stop_sequence":null,%s}'
)


def _messages_end(words: int, usage: bool) -> bytes:
    delta = b',"delta":{"stop_reason":"end_turn","stop_sequence":null},' + _COUNTS % words
    return (
        _chunk(_named(b"content_block_stop", b',"index":0'), _named(b"message_delta", delta), _named(b"message_stop"))
        + _LAST_CHUNK
    )


# -- Responses

_TEXT: Final = b'{"type":"output_text","text":"%s","annotations":[]}'
_ITEM: Final = b'{"type":"message","id":"msg_1","status":"%s","role":"assistant","content":[%s]}'
_PLACE: Final = b',"sequence_number":4,"item_id":"msg_1","output_index":0,"content_index":0'


def _response(status: bytes, output: bytes, usage: bytes) -> bytes:
    head = b'{"id":"resp_1","object":"response","created_at":1700000000,"model":"m","status":"%s"' % status
    return head + b',"output":[%s],"usage":%s}' % (output, usage)


def _completed(text: bytes, words: int) -> bytes:
    usage = b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d},"output_tokens":%d,"total_tokens":%d}'
    item = _ITEM % (b"completed", _TEXT % text)
    return _response(b"completed", item, usage % (_PROMPT, _CACHED, words, _PROMPT + words))


def _responses_begin() -> bytes:
    begun = b',"sequence_number":0,"response":' + _response(b"in_progress", b"", b"null")
    item = b',"sequence_number":2,"output_index":0,"item":' + _ITEM % (b"in_progress", b"")
    return _chunk(
        _named(b"response.created", begun),
        _named(b"response.in_progress", begun),
        _named(b"response.output_item.added", item),
        _named(b"response.content_part.added", _PLACE + b',"part":' + _TEXT % b""),
    )


def _responses_end(words: int, usage: bool) -> bytes:
    text = WORD * words
    item = b',"sequence_number":6,"output_index":0,"item":' + _ITEM % (b"completed", _TEXT % text)
    return (
        _chunk(
            _named(b"response.output_text.done", _PLACE + b',"text":"%s"' % text),
            _named(b"response.content_part.done", _PLACE + b',"part":' + _TEXT % text),
            _named(b"response.output_item.done", item),
            _named(b"response.completed", b',"sequence_number":7,"response":' + _completed(text, words)),
        )
        + _LAST_CHUNK
    )


_CHAT_REPLIES: Final = Replies(response(_ANSWER), b"", _chunk(_EVENT), _chat_end)
REPLIES: Final[Mapping[bytes, Replies]] = {
    CHAT: _CHAT_REPLIES,
    COMPLETIONS: _CHAT_REPLIES,
    MESSAGES: Replies(
        response(_MESSAGE % (b'{"type":"text","text":"%s"}' % (WORD * WORDS), b'"end_turn"', _COUNTS % WORDS)),
        _chunk(
            _named(b"message_start", b',"message":' + _MESSAGE % (b"", b"null", _COUNTS % 0)),
            _named(b"content_block_start", b',"index":0,"content_block":{"type":"text","text":""}'),
        ),
        _chunk(_named(b"content_block_delta", b',"index":0,"delta":{"type":"text_delta","text":"%s"}' % WORD)),
        _messages_end,
    ),
    RESPONSES: Replies(
        response(_completed(WORD * WORDS, WORDS)),
        _responses_begin(),
        _chunk(_named(b"response.output_text.delta", _PLACE + b',"delta":"%s"' % WORD)),
        _responses_end,
    ),
}
