"""A WebSocket message as a request of the gateway, and the messages of its answer.

    stream of events ──► one message per event: its data                 {"type": "response.output_text.delta", ...}
    any other answer ──► one message                                     {"type": "error", "status": 404, "error": {...}}

Both contain the request's `stream_id`, if it has one. If the answer breaks off, an incomplete event is dropped, so that an
error message can follow at any point.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import orjson

from gateway.admission.memory import MemoryLease
from gateway.dialects.events.sse import data_of
from gateway.dialects.excerpt import excerpt
from gateway.dialects.openai.errors import error_of
from gateway.errors import GatewayError
from gateway.features.histories.recent import ConnectionResponses, Lane
from gateway.features.websocket.create_message import CreateMessage, prewarm_events
from gateway.features.websocket.frames import text_frame
from gateway.features.websocket.message_socket import MessageSocket
from gateway.request.client import REQUEST_ID_HEADER, Caller, ClientReply, ClientRequest, Headers
from gateway.request.whole_events import WholeEvents
from gateway.server.http.request import HttpRequest
from gateway.upstream.client import PausableSource
from gateway.upstream.headers import upstream_headers

MAX_ERROR: Final = 64 << 10  # bytes of an answer that is not a stream

_NOT_FOUND: Final = "previous_response_not_found"  # OpenAI's code after which clients send the whole conversation again
_NAMED_HEADERS: Final = frozenset([b"retry-after", b"x-request-id"])  # forwarded in an error message
_HEADER: Final = re.compile(rb"([^:\r\n]+): ?([^\r\n]*)\r\n")
_STREAM: Final = b"text/event-stream"
_HANDSHAKE: Final = b"sec-websocket-"


class SocketOpening:
    """The request that opened the connection: the caller and headers of all its messages. lines: header lines for replicas."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self.caller = request.caller()
        pairs = [pair for pair in request.head.headers if not pair[0].lower().startswith((_HANDSHAKE, b"content-type"))]
        self.lines = b"%bContent-Type: application/json\r\n" % upstream_headers(pairs)


class MessageHeaders:
    """The headers of the opening request. The message's number is appended to a client's request id, so that ids are unique."""

    def __init__(self, opening: Headers, number: int) -> None:
        self._opening = opening
        self._number = number

    def get(self, name: str, /) -> str | None:
        value = self._opening.get(name)
        return f"{value}.{self._number}" if value and name == REQUEST_ID_HEADER else value


class MessageRequest(ClientRequest):
    """One message. opening: of its connection. To be closed."""

    def __init__(self, opening: SocketOpening, socket: MessageSocket, number: int, lease: MemoryLease) -> None:
        request = opening.request
        super().__init__("POST", request.path, request.target, MessageHeaders(request.headers, number), lease)
        self.opened_by = request
        self.opening = opening
        self.refers = False  # the request refers to an earlier response
        self.warms = False  # the client wants no output
        self.stream_id = ""
        self._socket = socket
        self._body = b""

    def put(self, body: bytes, found: CreateMessage, newest: ConnectionResponses) -> None:
        """Sets the body. newest: the connection's latest responses."""
        self._body = body
        self.stream_id, self.refers, self.warms = found.stream_id, found.refers, found.warms
        self.recent = Lane(newest, found.stream_id, warms=found.warms)

    def caller(self) -> Caller:
        return self.opening.caller

    def upstream_headers(self) -> bytes:
        return self.opening.lines

    @property
    def here(self) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return True

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def reply(self, *, keep_alive: bool, patience_s: float, size: int | None = None) -> ClientReply:
        return MessageReply(self._socket, self)

    def close(self) -> None:
        """Idempotent."""
        self._body = b""
        self.lease.close()

    def __repr__(self) -> str:
        return f"<MessageRequest {self.stream_id or '-'}, {len(self._body)} bytes>"


class MessageReply(ClientReply):
    """The messages of one answer."""

    def __init__(self, socket: MessageSocket, request: MessageRequest) -> None:
        super().__init__()
        self.keep_alive = True
        self._socket = socket
        self._stream_id = request.stream_id
        self._lease = request.lease
        self._refers = request.refers
        self._warms = request.warms
        self._source: PausableSource | None = None
        self._events: WholeEvents | None = None  # of a stream
        self._status = 0
        self._length: int | None = None
        self._headers = b""
        self._held = bytearray()  # the body of an answer that is not a stream
        self._ended = False

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        self.begun = True
        self._status, self._headers, self._length = status, headers, length
        kinds = [value for name, value in _HEADER.findall(headers) if name.lower() == b"content-type"]
        if status == 200 and kinds and kinds[0].lower().startswith(_STREAM):
            self._events = WholeEvents(self._lease)
        self.write(first)
        if not self._events and length == 0:
            self._send_error()

    def write(self, data: bytes) -> None:
        if self._ended or not data:
            return
        if self._events:
            self._send(self._events.feed(data))
            self._events.charge()
            return
        self._held += data[: MAX_ERROR - len(self._held)]
        if self._length is not None and len(self._held) >= min(self._length, MAX_ERROR):
            self._send_error()

    def end(self, last: bytes = b"") -> None:
        self.write(last)
        if not self._ended:
            if self._events:
                self._send(self._events.finish())
            else:
                self._send_error()
        self._close()

    def cut(self) -> None:
        """The answer breaks off. Other transports cannot send an error now; a WebSocket can. A client that does not read is
        dropped.
        """
        if not self._socket.writable:
            self._socket.abort()
        elif not self._ended:
            self._fail(GatewayError(502, "replica_failed", "The replica failed while it answered. Retry the request."))

    def feed_from(self, answer: PausableSource | None) -> None:
        if self._source:
            self._socket.sources.discard(self._source)
        self._source = answer
        if answer:
            self._socket.feed_from(answer)

    def _send(self, events: Sequence[bytes]) -> None:
        if self._warms:
            events = prewarm_events(events)
        messages = [text_frame(text) for event in events if (text := self._message(data_of(event)))]
        if messages:
            self._socket.send(b"".join(messages))

    def _message(self, data: bytes) -> bytes:
        """An event's data with the stream id; b"" if it is not an object ([DONE], or none)."""
        data = data.strip()
        if not (data.startswith(b"{") and data.endswith(b"}")):
            return b""
        if not data.isascii():
            data = data.decode("utf-8", "replace").encode()  # a text message must be UTF-8
        return labelled(data, self._stream_id)

    def _send_error(self) -> None:
        """Sends the message for an answer that is not a stream."""
        body = bytes(self._held)
        self._close()
        error = _error_in(body, self._status)
        if self._refers and _lacks_response(error, self._status):
            error["code"] = _NOT_FOUND
        headers = {
            name.lower().decode("latin-1"): value.decode("latin-1")
            for name, value in _HEADER.findall(self._headers)
            if name.lower() in _NAMED_HEADERS
        }
        status = self._status if self._status >= 400 else 502
        self._socket.send(text_frame(error_message(error, status, self._stream_id, headers)))

    def _fail(self, error: GatewayError) -> None:
        self._close()
        self._socket.send(text_frame(message_of(error, self._stream_id)))

    def _close(self) -> None:
        self._ended = True
        self._held = bytearray()
        if self._events:
            self._events.drop()

    def __repr__(self) -> str:
        state = "over" if self._ended else "begun" if self.begun else "not begun"
        return f"<MessageReply {state}, {self._events or len(self._held)!r}>"


def labelled(data: bytes, stream_id: str) -> bytes:
    """A JSON object with the stream id as its first member. O(length)."""
    if not stream_id:
        return data
    comma = b"" if data[1:].lstrip().startswith(b"}") else b","
    return b'{"stream_id":"%b"%b%b' % (stream_id.encode("ascii"), comma, data[1:])


def message_of(error: GatewayError, stream_id: str = "") -> bytes:
    """The message for an error of the gateway."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return error_message(error_of(error)["error"], error.status, stream_id, headers)


def error_message(error: dict[str, Any], status: int, stream_id: str, headers: dict[str, str]) -> bytes:
    message = {"type": "error", "status": status, "error": error}
    if headers:
        message["headers"] = headers
    return labelled(orjson.dumps(message), stream_id)


def _error_in(body: bytes, status: int) -> dict[str, Any]:
    """The error in a body, in OpenAI's format."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if status < 400:
        text = f"The replica answered {status}, without a stream of events."
        return error_of(GatewayError(502, "replica_failed", text))["error"]
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict):
        return error
    return error_of(GatewayError(status, "replica_error", excerpt(body) or f"The replica answered {status}."))["error"]


def _lacks_response(error: dict[str, Any], status: int) -> bool:
    """True if a replica refuses the request because it does not have the earlier response."""
    about = error.get("param") == "previous_response_id" or "previous_response" in str(error.get("message"))
    return about if status == 400 else status in (404, 410) and error.get("code") != "model_not_found"
