"""The session with which OpenTelemetry's library posts a batch: bounded where the library is not, and it knows what went wrong.

The library waits for each *read*, follows no redirect but takes one for success, reads an answer whatever its length, and does
not look into it. So each answer is read here, all of it within `deadline` for the batch, and at most MAX_ANSWER; what is not a
collector's answer is an error that the library does not try again. `problem` is the last attempt's, in words; `rejected` is how
many spans the collector has left out of what it took.

Imported when traces are configured: `requests` comes with the library.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import requests
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from requests.adapters import HTTPAdapter
from urllib3 import PoolManager
from urllib3.connection import HTTPConnection

MAX_ANSWER: Final = 64 << 10  # bytes
PROTOBUF: Final = "application/x-protobuf"
_PART: Final = 4096  # bytes that are read at once
_AGAIN_S: Final = 0.1  # a connection that is made at the deadline has its socket later
_SHOWN: Final = 200  # characters of what a collector says


class AnswerError(ConnectionAbortedError):
    """What came is no collector's answer to a batch, or not in time."""


Connecting = Callable[[HTTPConnection], None]


class Adapter(HTTPAdapter):
    """Tells of each connection before it is made."""

    def __init__(self, connecting: Connecting) -> None:
        self._connecting = connecting
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        _watch(self.poolmanager, self._connecting)

    def proxy_manager_for(self, proxy: str, **options: Any) -> PoolManager:
        known = proxy in self.proxy_manager
        manager: PoolManager = super().proxy_manager_for(proxy, **options)
        if not known:
            _watch(manager, self._connecting)
        return manager


def _watch(manager: PoolManager, connecting: Connecting) -> None:
    """Its pools make connections that tell. What they are depends on the proxy."""
    pools = manager.pool_classes_by_scheme
    manager.pool_classes_by_scheme = {scheme: _watched(pool, connecting) for scheme, pool in pools.items()}


def _watched(pool: Any, connecting: Connecting) -> Any:
    connection: Any = pool.ConnectionCls

    class Connection(connection):  # type: ignore[misc]
        def connect(self) -> None:
            connecting(self)
            super().connect()

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection})


class Posting(requests.Session):
    """See the top of this file. deadline: of the monotonic clock, set before each batch, as are `problem` and `rejected`."""

    def __init__(self) -> None:
        super().__init__()
        self._connection: HTTPConnection | None = None  # the last one
        for scheme in ("http://", "https://"):
            self.mount(scheme, Adapter(self._connecting))
        self.begin(0.0)

    def begin(self, within_s: float) -> None:
        """Before a batch."""
        self.deadline = time.monotonic() + within_s
        self.problem = ""
        self.rejected = 0

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Raises what `requests` does, and AnswerError."""
        try:
            with self._cut_off_late():
                response = super().send(request, **{**options, "stream": True})
                with response:
                    self._take(response)
        except Exception as error:
            self.problem = _words(error)
            raise
        return response

    def _connecting(self, connection: HTTPConnection) -> None:
        """To make a connection takes as long as the library says, a handshake included; then its socket is known."""
        self._connection = connection

    def _take(self, response: requests.Response) -> None:
        if 300 <= response.status_code < 400:
            where = response.headers.get("Location", "")[:_SHOWN]
            advice = f" to {where!r}: name that in tracing.endpoint" if where else ""
            raise AnswerError(f"the collector redirects ({response.status_code}){advice}")
        answer = self._read(response)
        if not response.ok:
            self.problem = f"the collector answers {response.status_code} {response.reason}"[:_SHOWN]
        elif response.headers.get("Content-Type", "").partition(";")[0].strip() == PROTOBUF:
            self._look_into(answer)

    def _read(self, response: requests.Response) -> bytes:
        found = bytearray()
        for part in response.iter_content(_PART):
            found += part
            if len(found) > MAX_ANSWER:
                raise AnswerError(f"an answer of more than {MAX_ANSWER >> 10} KiB: it is no collector's")
        return bytes(found)

    @contextlib.contextmanager
    def _cut_off_late(self) -> Iterator[None]:
        """Meanwhile the connection ends at the deadline, also within a read: an answer, or its head, may come byte by byte."""
        done = threading.Event()
        watching = threading.Thread(target=self._cut_off, args=(done,), daemon=True)
        watching.start()
        try:
            yield
        except AnswerError:
            raise
        except Exception as error:
            if time.monotonic() >= self.deadline:
                raise AnswerError("no whole answer in time") from error
            raise
        finally:
            done.set()
            watching.join()
        if time.monotonic() >= self.deadline:
            raise AnswerError("no whole answer in time")

    def _cut_off(self, done: threading.Event) -> None:
        wait_s = max(0.0, self.deadline - time.monotonic())
        while not done.wait(wait_s):
            sock: object = self._connection and self._connection.sock
            sock = getattr(sock, "socket", sock)  # TLS through a proxy with TLS
            if isinstance(sock, socket.socket):
                with contextlib.suppress(OSError):  # of the socket below TLS: a thread is in its read
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
            wait_s = _AGAIN_S

    def _look_into(self, answer: bytes) -> None:
        with contextlib.suppress(DecodeError):  # the status says that it has taken them
            partial = ExportTraceServiceResponse.FromString(answer).partial_success
            if partial.rejected_spans > 0:
                self.rejected = partial.rejected_spans
                self.problem = f"the collector has rejected spans: {partial.error_message[:_SHOWN] or 'it does not say why'}"


def _words(error: BaseException) -> str:
    """What is at its root: `requests` wraps three errors around a refused connection."""
    while not isinstance(error, AnswerError) and (cause := error.__cause__ or error.__context__):
        error = cause
    return str(error) or type(error).__name__
