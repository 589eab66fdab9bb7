"""The events of a gateway (GET /warmroute/live/events), read by a thread that begins anew whenever they end.

    connection ── lines ──► event ── call_soon_threadsafe ──► take(event), in the loop ──► the next event is read

One event at a time: while the loop has not taken one, nothing is read, so a gateway that sends more than can be shown is slowed
down by TCP, and nothing grows here. `lost` is told once for each time that the events end; then the feed waits, longer each
time, up to LONGEST_WAIT_S. With a 401 it waits for `resume`, for it needs another key.

Bounds: MOST_LINE bytes of an event. A gateway sends something every second; after SILENT_S without, the connection is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

from gateway.commands.operate import ANSWER_S, OperatorError, connected, credentials, refusal
from gateway.commands.top.access import Access

PATH: Final = "/warmroute/live/events"
MOST_LINE: Final = 16 << 20  # bytes
MOST_REFUSAL: Final = 1 << 16  # bytes
SILENT_S: Final = ANSWER_S
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 5.0
LOST: Final = "lost"


class Feed:
    """See the top of this file. take(event, value): in the loop; for LOST, value is an OperatorError."""

    def __init__(self, access: Access, take: Callable[[str, Any], None]) -> None:
        self._access = access
        self._take = take
        self._ends = threading.Event()
        self._again = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="warmroute top", daemon=True)

    def start(self) -> None:
        """In the event loop that `take` belongs to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def resume(self) -> None:
        """Try again now: there is another key."""
        self._again.set()

    def close(self) -> None:
        """The thread ends by itself; nothing is taken from it any more."""
        self._ends.set()
        self._again.set()
        if connection := self._socket:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    def _run(self) -> None:
        wait = FIRST_WAIT_S
        while not self._ends.is_set():
            self._again.clear()
            try:
                with contextlib.closing(self._events()) as events:
                    for event, value in events:
                        wait = FIRST_WAIT_S
                        self._deliver(event, value)
                        if self._ends.is_set():  # what has come already can be read for long
                            return
                error = OperatorError(f"{self._access.admin} has ended its events")
            except OperatorError as failed:
                error = failed
            except (OSError, http.client.HTTPException, ValueError) as failed:
                error = OperatorError(f"{self._access.admin} is gone: {getattr(failed, 'strerror', None) or failed}")
            if self._ends.is_set():
                return
            self._deliver(LOST, error)
            self._again.wait(None if error.status == 401 else wait * random.uniform(0.7, 1.0))
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _deliver(self, event: str, value: Any) -> None:
        """Returns when the loop has taken it, or the feed ends."""
        taken = threading.Event()

        def take() -> None:
            try:
                if not self._ends.is_set():
                    self._take(event, value)
            finally:
                taken.set()

        assert self._loop is not None, "start has set it"
        try:
            self._loop.call_soon_threadsafe(take)
        except RuntimeError:  # the loop is closed
            self._ends.set()
        while not self._ends.is_set() and not taken.wait(1.0):
            pass

    def _events(self) -> Generator[tuple[str, Any], None, None]:
        """Until the connection ends. Raises OperatorError, OSError, HTTPException, ValueError."""
        headers = credentials(self._access.env)
        connection, prefix = connected(self._access.admin)
        try:
            self._socket = connection.sock
            connection.sock.settimeout(SILENT_S)
            connection.request("GET", prefix + PATH, headers={**headers, "Accept": "text/event-stream"})
            with connection.getresponse() as answer:
                yield from self._read(answer, has_key=bool(headers))
        finally:
            self._socket = None
            connection.close()

    def _read(self, answer: http.client.HTTPResponse, *, has_key: bool) -> Iterator[tuple[str, Any]]:
        if answer.status != 200 or "event-stream" not in (answer.headers.get("Content-Type") or ""):
            raise refused(self._access.admin, answer.status, answer.read(MOST_REFUSAL), has_key=has_key)
        yield from parsed(iter(lambda: answer.readline(MOST_LINE + 1), b""))


def refused(admin: str, status: int, raw: bytes, *, has_key: bool) -> OperatorError:
    """What an answer means that has no events."""
    if status in (200, 404, 405):
        text = f"{admin} has no live feed: it is no admin listener (admin_listen), or is of an older release"
        return OperatorError(text, 404)
    return OperatorError(refusal(admin, status, raw, has_key=has_key), status)


def parsed(lines: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    """(name, value) of server-sent events whose data is one line of JSON, as this gateway's are. Raises ValueError."""
    event = ""
    for line in lines:
        if len(line) > MOST_LINE:
            raise ValueError(f"it sends an event of more than {MOST_LINE >> 20} MiB")
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        if name == b"event":
            event = value.strip().decode("ascii", "replace")[:20]
        elif name == b"data":
            yield event, decoded(value)
            event = ""


def decoded(raw: bytes) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it sends JSON that is nested too deeply") from None
