"""Writes log lines to standard error from a thread, with a bounded buffer.

    request log, records ──► lines of a batch ── FLUSH_S ──► queue ──► writer thread ──► write(2), which may block

The reader of the log may stall: a log driver, a pager, a full disk. Writing then blocks, so it is done in a daemon thread and
never in the event loop. At most BUFFER_BYTES are buffered; further lines are dropped and counted, and a line with the count is
written when half of the buffer is free again. Lines that cannot be written at all (the pipe is closed, the disk is full) count
as dropped, too. Records during the interpreter's end (an unretrieved error of a task) are written at once.

Standard error is not made non-blocking, because other processes share its file description.

A request's line costs one `append` and no lock: only the event loop's thread uses the batch. The queue is shared between
threads and guarded by `_changed`. The writer wakes up once per batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

from gateway.telemetry.line_format import LineFormat, json_line

FLUSH_S: Final = 0.1
BUFFER_BYTES: Final = 4 << 20
END_S: Final = 1.0  # for the rest of the buffer at process exit
_WRITE_BYTES: Final = 1 << 16  # per write; each frees its part of the buffer

NO_FIELDS: Final[Mapping[str, Any]] = {}

Sink = Callable[[memoryview], int]
"""Writes some of the bytes and returns their number. May block. Raises OSError, or ValueError if it is closed."""


class LogOutput:
    """Writes log lines (see the module)."""

    def __init__(
        self,
        sink: Sink,
        *,
        shared: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
        fixed: Mapping[str, Any] = NO_FIELDS,
        line: LineFormat = json_line,
    ) -> None:
        """shared: other processes write to the same pipe, where writes of up to PIPE_BUF bytes are atomic. fixed and line: the
        fields and the format of lines about the log itself.
        """
        self.dropped = 0  # lines
        self._sink = sink
        self._write_bytes = select.PIPE_BUF if shared else _WRITE_BYTES
        self._buffer_bytes = buffer_bytes
        self._fixed = fixed
        self._line = line
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._changed = threading.Condition()
        self._queue: list[bytes] = []
        self._queue_bytes = 0  # including the part being written
        self._writer: threading.Thread | None = None
        self._closed = False
        self._reported = 0  # dropped lines already reported
        self._stalled = False  # `flush` timed out, and nothing was written since
        self._torn = False  # the last write failed in the middle of a line

    def write(self, line: bytes) -> None:
        """Write a line. Called in the event loop's thread. The line is written within FLUSH_S; at once if no loop runs."""
        size = len(line) + 1
        if self._batch_bytes + self._queue_bytes + size > self._buffer_bytes:
            self._drop(1)
            return
        self._batch.append(line)
        self._batch_bytes += size
        if self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.hand_over)
            except RuntimeError:
                self.hand_over()

    def write_record(self, line: bytes, *, urgent: bool) -> None:
        """Write a record. Called in any thread. urgent: the line, and all earlier ones, are written at once."""
        if sys.is_finalizing():  # no thread can begin now, and the writer is frozen, perhaps with the lock
            self._write(line + b"\n")
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if self._queue_bytes + len(line) + 1 > self._buffer_bytes:
                self._drop(1)
            else:
                self._enqueue([line], len(line) + 1)
            return
        self.write(line)
        if urgent:
            self.hand_over()

    def hand_over(self) -> None:
        """Pass the batch to the writer. Called in the event loop's thread. Does not block."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._batch:
            batch, self._batch = self._batch, []
            size, self._batch_bytes = self._batch_bytes, 0
            self._enqueue(batch, size)

    def flush(self, timeout_s: float = END_S) -> bool:
        """Wait until all lines are written or dropped. False on timeout; the next call then does not wait."""
        self.hand_over()
        with self._changed:
            written = self._changed.wait_for(lambda: not self._queue_bytes, 0 if self._stalled else timeout_s)
            self._stalled = not written
        return written

    def close(self) -> None:
        """End the writer after the last line. Not needed at process exit: it is a daemon thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _drop(self, lines: int) -> None:
        with self._changed:
            self.dropped += lines

    def _enqueue(self, lines: list[bytes], size: int) -> None:
        with self._changed:
            self._queue += lines
            self._queue_bytes += size
            self._changed.notify_all()
            if self._writer is None:
                self._writer = threading.Thread(target=self._keep_writing, name="log", daemon=True)
                try:
                    self._writer.start()
                except RuntimeError:  # the process may start no more threads: write here, which may block
                    self._writer = None
                    self._write_queue()

    # -- in the writer's thread

    def _keep_writing(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
            self._write_queue()

    def _write_queue(self) -> None:
        with self._changed:
            lines, self._queue = self._queue, []
        for part in parts_of(lines, self._write_bytes):
            data = b"\n".join((*part, b""))
            written = self._write(data)
            with self._changed:
                self._stalled = False
                self._queue_bytes -= len(data)
                if not written:
                    self.dropped += len(part)
                elif self.dropped > self._reported and self._queue_bytes <= self._buffer_bytes // 2:
                    self._report()
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        """Write the data. True if all of it was written."""
        left = memoryview(b"\n" + data if self._torn else data)
        size = len(left)
        try:
            while left:
                taken = self._sink(left)  # not inside the slice: mypyc would call it twice
                left = left[taken:]
        except (OSError, ValueError):
            self._torn = self._torn if len(left) == size else True
            return False
        self._torn = False
        return True

    def _report(self) -> None:
        """Queue a line with the number of dropped lines."""
        line = self._line(
            {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                "level": "warning",
                "logger": "warmroute.log",
                "message": "log lines dropped: their reader does not keep up, or they could not be written",
                **self._fixed,
                "dropped": self.dropped - self._reported,
            }
        )
        self._reported = self.dropped
        self._queue.append(line)
        self._queue_bytes += len(line) + 1

    def __repr__(self) -> str:
        return f"<Output, {self._batch_bytes + self._queue_bytes} bytes to be written, {self.dropped} lines dropped>"


def parts_of(lines: Iterable[bytes], limit: int) -> Iterator[Sequence[bytes]]:
    """The lines in parts of at most `limit` bytes, line ends included; a longer line is a part of its own."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        if part and size + len(line) + 1 > limit:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
    if part:
        yield part


def sink_of(stream: TextIO | None) -> Sink:
    """A sink that bypasses a standard stream's buffers. stream: None or closed if it was so when the process started."""
    if stream is None or stream.closed:
        return _refuse
    try:
        file = stream.fileno()
    except (OSError, ValueError):  # a stand-in without a file
        return stream.buffer.write

    def write(data: memoryview) -> int:
        try:
            return os.write(file, data)
        except BlockingIOError:  # another process has made it non-blocking
            with contextlib.suppress(OSError):
                select.select((), (file,), (), FLUSH_S)
            return 0

    return write


def _refuse(_data: memoryview) -> int:
    raise OSError(errno.EBADF, "standard error is closed")
