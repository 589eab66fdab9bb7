"""Everything that is used of aiohttp's server beside its public API, and the check at the start that it is still there.

The connection of a client (`http/connection.py`) is aiohttp's, with bounds and a fast path past its requests. Such a connection
has to know what aiohttp is at: what it waits for, what it has yet to answer, why it does not read. aiohttp does not say, so it
is read from attributes that a release may rename or give another meaning. All names of a connection and of its parser that are
not public are in this file; `moved` compares them with the release that is installed, and drives requests through aiohttp's
reader, for what `http/bounded_parser.py` relies on. Where anything differs, `Seam` says so once in the log, and clients are
served by `fallback/`, which uses nothing but the public API: slower, and with fewer bounds.

What a name means cannot be checked at a start: `tests/gateway/server/http/` does that for each release that CI installs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

import aiohttp
from aiohttp import HttpVersion11, web
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import LineTooLong

log = logging.getLogger("warmroute.gateway")

Methods = Mapping[tuple[type, str], tuple[str, ...]]

# Methods that are overridden or called, and their parameters without `self`.
METHODS: Final[Methods] = {
    (web.RequestHandler, "connection_made"): ("transport",),
    (web.RequestHandler, "connection_lost"): ("exc",),
    (web.RequestHandler, "data_received"): ("data",),
    (web.RequestHandler, "eof_received"): (),
    (web.RequestHandler, "start"): (),
    (web.RequestHandler, "finish_response"): ("request", "resp", "start_time"),
    (web.RequestHandler, "handle_error"): ("request", "status", "exc", "message"),
    (web.RequestHandler, "log_exception"): ("args", "kw"),
    (web.RequestHandler, "close"): (),
    (web.RequestHandler, "force_close"): (),
    (web.RequestHandler, "pause_reading"): (),
    (web.RequestHandler, "resume_reading"): ("resume_parser",),
    (web.RequestHandler, "pause_writing"): (),
    (web.RequestHandler, "resume_writing"): (),
    (web.RequestHandler, "_pause_transport_reading"): (),
    (web.RequestHandler, "_resume_transport_reading"): (),
    (web.RequestHandler, "_process_keepalive"): (),
    (web.AppRunner, "_make_server"): (),
    (web.Application, "_make_request"): ("message", "payload", "protocol", "writer", "task", "_cls"),
    (web.Application, "_handle"): ("request",),
    (web.Server, "pre_shutdown"): (),
    (web.Server, "shutdown"): ("timeout",),
    (StreamWriter, "drain"): (),
}
PARSER: Final = frozenset(["feed_data", "feed_eof", "message_consumed", "pause_reading", "set_upgraded"])  # its methods
_REQUEST: Final = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab"
_PARTIAL: Final = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab"
_UPGRADE: Final = b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"


T = TypeVar("T")


class Attribute(Protocol[T]):
    """An attribute of a connection."""

    def __get__(self, connection: object, kind: type, /) -> T: ...
    def __set__(self, connection: object, value: T, /) -> None: ...


class _Gone:
    """In the place of an attribute that this release does not have."""

    def __init__(self, name: str) -> None:
        self.name = name


def attribute(name: str) -> Any:
    """One of aiohttp's, to be given another name: the slot itself, so that it costs nothing."""
    slot = getattr(web.RequestHandler, name, None)
    return slot if inspect.isdatadescriptor(slot) else _Gone(name)


class AiohttpConnection(web.RequestHandler):
    """aiohttp's connection, whose insides have public names.

    transport: None before and after the connection. writing_paused: the client does not keep up.
    messages: what is read and not begun. max_messages: so many, then it reads no more. waiter: what it waits for a request
    with. closes: after what is here; closes_at_once: it is over. reading_paused: a body is not read; buffer_paused: too many
    messages wait. upgraded: what is behind an Upgrade waits. idle_until: closed then, by the loop's clock, if it is idle.
    """

    __slots__ = ()

    transport: Attribute[asyncio.Transport | None] = attribute("transport")
    writing_paused: Attribute[bool] = attribute("writing_paused")
    loop: Attribute[asyncio.AbstractEventLoop] = attribute("_loop")
    parser: Attribute[Any] = attribute("_parser")
    messages: Attribute[deque[tuple[Any, Any]]] = attribute("_messages")
    max_messages: Attribute[int] = attribute("_max_msg_queue_size")
    waiter: Attribute[asyncio.Future[None] | None] = attribute("_waiter")
    current_request: Attribute[web.BaseRequest | None] = attribute("_current_request")
    closes: Attribute[bool] = attribute("_close")
    closes_at_once: Attribute[bool] = attribute("_force_close")
    reading_paused: Attribute[bool] = attribute("_reading_paused")
    buffer_paused: Attribute[bool] = attribute("_buffer_paused")
    upgraded: Attribute[bool] = attribute("_upgraded")
    idle_s: Attribute[float] = attribute("_keepalive_timeout")
    idle_until: Attribute[float] = attribute("_next_keepalive_close_time")

    def pause_transport(self) -> None:
        self._pause_transport_reading()

    def resume_transport(self) -> None:
        """aiohttp takes more. To be overridden."""
        super()._resume_transport_reading()

    def check_idle(self) -> None:
        """The time may have come to close an idle connection. To be overridden."""
        super()._process_keepalive()

    # What aiohttp calls.

    def _resume_transport_reading(self) -> None:
        self.resume_transport()

    def _process_keepalive(self) -> None:
        self.check_idle()


def as_1_1(request: web.BaseRequest) -> None:
    """aiohttp takes what it cannot read for HTTP/1.0."""
    request._version = HttpVersion11


def factory_of(app: web.Application) -> Callable[..., web.Request]:
    """What makes the application's requests."""
    return app._make_request


def handler_of(app: web.Application) -> Callable[[Any], Awaitable[Any]]:
    """What answers them: middlewares, then the route's handler."""
    return app._handle


class ServerOfOurs(web.Server):
    def close_idle(self) -> bool:
        """See `CloseIdle`."""
        raise NotImplementedError


class Runner(web.AppRunner):
    """Starts and ends the application, and serves it through a server of ours."""

    def __init__(self, app: web.Application, make_server: Callable[[], ServerOfOurs], *, shutdown_timeout: float) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout)
        self._make_our_server = make_server
        self._ours: ServerOfOurs | None = None

    async def _make_server(self) -> web.Server:
        await super()._make_server()  # starts the application up
        self._ours = self._make_our_server()
        return self._ours

    def close_idle(self) -> bool:
        """See `CloseIdle`."""
        return self._ours.close_idle() if self._ours else False

    @property
    def protocols(self) -> Callable[[], asyncio.Protocol]:
        """Makes the protocol of one connection. After `setup`."""
        assert self.server is not None
        return self.server


# -- the check


class Seam:
    """Whether aiohttp is as it is used here. Looked at once, when it is first asked; what has moved is logged then."""

    def __init__(self, look: Callable[[], Sequence[str]] | None = None) -> None:
        """look: names what has moved (default: `moved`)."""
        self._look = look or moved
        self._holds: bool | None = None

    @property
    def holds(self) -> bool:
        """To be asked within the event loop."""
        if self._holds is None:
            names = self._look()
            self._holds = not names
            if names:
                about = {"aiohttp": aiohttp.__version__, "moved": list(names)}
                log.warning("aiohttp has moved what the fast path uses: requests take aiohttp's own, slower path", extra=about)
        return self._holds


def moved(connection: type[AiohttpConnection] = AiohttpConnection, methods: Methods = METHODS) -> list[str]:
    """What this release of aiohttp does not have, or has otherwise."""
    found = [f"RequestHandler.{each.name}" for _, each in inspect.getmembers_static(connection) if isinstance(each, _Gone)]
    for (kind, name), wanted in methods.items():
        method = getattr(kind, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1:] != wanted:
            found.append(f"{kind.__name__}.{name}")
    if not found:
        try:
            found.extend(_probe(connection))
        except Exception as error:  # whatever it is: it is not as it was
            log.debug("aiohttp's reader", exc_info=error)
            found.append(f"its reader: {error!r}")
    return found


class _Recorder:
    """Between a connection and its parser. asked: what the connection asks of it."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.fed = b""
        self.asked = set[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> Any:
        self.fed += data
        return self._parser.feed_data(data)


class _Answer:
    """What aiohttp asks of it, in this order."""

    keep_alive = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def prepare(self, _request: web.BaseRequest) -> None:
        self.asked.append("prepare")

    async def write_eof(self) -> None:
        self.asked.append("write_eof")


async def _nothing(_request: Any) -> Any:
    return None


def _probe(kind: type[AiohttpConnection]) -> Iterator[str]:
    """Read requests, without a transport, and name what is not as `http/` needs it."""
    yield from _probe_request(*_recorded(kind))
    yield from _probe_pauses(*_recorded(kind))
    yield from _probe_upgrade(*_recorded(kind))
    if LineTooLong(b"", "7").args[1] != "7":
        yield "LineTooLong: its second argument is the bound"


def _recorded(kind: type[AiohttpConnection]) -> tuple[AiohttpConnection, _Recorder]:
    server = web.Server(_nothing, request_factory=None, handler_cancellation=True)
    options: dict[str, Any] = {"auto_decompress": False, "access_log": None}
    connection = kind(server, loop=asyncio.get_running_loop(), **options)
    recorder = _Recorder(connection.parser)
    connection.parser = recorder
    return connection, recorder


def _probe_request(connection: AiohttpConnection, recorder: _Recorder) -> Iterator[str]:
    """One request, and its answer."""
    connection.data_received(_REQUEST)
    if recorder.fed != _REQUEST:
        yield "RequestHandler.data_received: the parser gets all bytes"
    if connection.waiter is not None or len(connection.messages) != 1:
        yield "RequestHandler: a request that is read waits in its messages"
    message, payload = connection.messages[0]
    fields = (message.method, message.path, message.version, message.raw_headers[0], message.headers["Host"])
    if fields != ("POST", "/a", HttpVersion11, (b"Host", b"h"), "h"):
        yield "a message's fields"
    if (message.upgrade, message.chunked, message._replace(should_close=True).should_close) != (False, False, True):
        yield "a message's flags"
    if (payload.total_bytes, payload.is_eof(), payload.read_nowait()) != (2, True, b"ab"):
        yield "a payload's bytes"
    request = _request_of(connection, message, payload)
    if request.version != HttpVersion11 or "_version" not in vars(request):
        yield "BaseRequest._version"
    answer = _Answer()
    if (_finished(connection, request, answer), answer.asked) != ((answer, False), ["prepare", "write_eof"]):
        yield "RequestHandler.finish_response"
    recorder.message_consumed()
    if recorder.asked - PARSER:
        yield f"the parser's methods: {sorted(recorder.asked - PARSER)}"


def _probe_pauses(connection: AiohttpConnection, recorder: _Recorder) -> Iterator[str]:
    """A body of which a part has come, and is not read: the parser keeps what follows, until it is fed b""."""
    connection.pause_writing()
    paused = connection.writing_paused
    connection.resume_writing()
    if (paused, connection.writing_paused) != (True, False):
        yield "RequestHandler.writing_paused"
    connection.data_received(_PARTIAL)
    payload = connection.messages[0][1]
    if (payload.total_bytes, payload.is_eof()) != (2, False):
        yield "a partial payload"
    connection.pause_reading()
    if (recorder.asked, connection.reading_paused) != ({"pause_reading"}, True):
        yield "RequestHandler.pause_reading: it pauses its parser"
    recorder.fed = b""
    connection.resume_reading()
    connection.data_received(b"c")
    if (recorder.fed, payload.total_bytes, connection.reading_paused) != (b"c", 3, False):
        yield "RequestHandler.resume_reading: it feeds its parser b''"
    payload.feed_eof()
    if (payload.is_eof(), payload.read_nowait()) != (True, b"abc"):
        yield "a payload that is ended early"


def _probe_upgrade(connection: AiohttpConnection, recorder: _Recorder) -> Iterator[str]:
    """A request for an upgrade, which is declined: what is behind it waits until then."""
    connection.data_received(_UPGRADE)
    message, payload = connection.messages.popleft()
    if (message.upgrade, connection.upgraded) != (True, True):
        yield "a request for an upgrade"
    _finished(connection, _request_of(connection, message, payload), _Answer())
    if ("set_upgraded" in recorder.asked, connection.upgraded) != (True, False):
        yield "RequestHandler.finish_response: it ends the wait behind an upgrade"
    if recorder.feed_eof() is not None or recorder.asked - PARSER:
        yield f"the parser's methods: {sorted(recorder.asked)}"


def _request_of(connection: AiohttpConnection, message: Any, payload: Any) -> web.Request:
    writer = StreamWriter(cast(Any, connection), connection.loop)
    return factory_of(web.Application())(message, payload, connection, writer, None)


def _finished(connection: AiohttpConnection, request: web.Request, answer: _Answer) -> Any:
    """What `finish_response` returns for an answer that waits for nothing; None: it waits."""
    try:
        connection.finish_response(request, cast(Any, answer), None).send(None)
    except StopIteration as end:
        return end.value
    return None
