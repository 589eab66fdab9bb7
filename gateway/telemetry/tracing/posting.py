"""The session with which OpenTelemetry's library posts a batch: bounded where the library is not, and it knows what went wrong.

The library waits for each *read*, follows no redirect but takes one for success, reads an answer whatever its length, and does
not look into it. So each answer is read here, within `deadline` for the batch and MAX_ANSWER; what is not a collector's answer
is an error that the library does not try again. `problem` is the last attempt's, in words; `rejected` is how many spans the
collector has left out of what it took. (Of an answer's *head* each read has the time that was left, not all of them together.)

Imported when traces are configured: `requests` comes with the library.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import requests
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

MAX_ANSWER: Final = 64 << 10  # bytes
PROTOBUF: Final = "application/x-protobuf"
_PART: Final = 4096  # bytes that are read at once
_SHOWN: Final = 200  # characters of what a collector says


class AnswerError(ConnectionAbortedError):
    """What came is no collector's answer to a batch, or not in time."""


class Posting(requests.Session):
    """See the top of this file. deadline: of the monotonic clock, set before each batch, as are `problem` and `rejected`."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(0.0)

    def begin(self, within_s: float) -> None:
        """Before a batch."""
        self.deadline = time.monotonic() + within_s
        self.problem = ""
        self.rejected = 0

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Raises what `requests` does, and AnswerError."""
        try:
            response = super().send(request, **{**options, "stream": True})
            with response:
                self._take(response)
        except Exception as error:
            self.problem = _words(error)
            raise
        return response

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
        with self._cut_off_late(response):
            for part in response.iter_content(_PART):
                found += part
                if len(found) > MAX_ANSWER:
                    raise AnswerError(f"an answer of more than {MAX_ANSWER >> 10} KiB: it is no collector's")
        if time.monotonic() >= self.deadline:
            raise AnswerError("no whole answer in time")
        return bytes(found)

    @contextlib.contextmanager
    def _cut_off_late(self, response: requests.Response) -> Iterator[None]:
        """Meanwhile the connection ends at the deadline, also within a read: an answer may come byte by byte."""
        if response.raw.closed:  # it is empty
            yield
            return
        sock = socket.socket(fileno=os.dup(response.raw.fileno()))
        timer = threading.Timer(max(0.0, self.deadline - time.monotonic()), _shut, (sock,))
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if time.monotonic() >= self.deadline:
                raise AnswerError("no whole answer in time") from error
            raise
        finally:
            timer.cancel()
            timer.join()
            sock.close()

    def _look_into(self, answer: bytes) -> None:
        with contextlib.suppress(DecodeError):  # the status says that it has taken them
            partial = ExportTraceServiceResponse.FromString(answer).partial_success
            if partial.rejected_spans > 0:
                self.rejected = partial.rejected_spans
                self.problem = f"the collector has rejected spans: {partial.error_message[:_SHOWN] or 'it does not say why'}"


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _words(error: BaseException) -> str:
    """What is at its root: `requests` wraps three errors around a refused connection."""
    while not isinstance(error, AnswerError) and (cause := error.__cause__ or error.__context__):
        error = cause
    return str(error) or type(error).__name__
