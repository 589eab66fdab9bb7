"""Standard output and standard error of commands, on a full disk, or closed.

Output that cannot be written ends any command with one line and a status. At its end Python writes the rest of its buffer once
more, and complains about errors: so after a failure the rest is discarded. A message that cannot be written ends nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class OutputError(Exception):
    """Standard output cannot be written; the text is the reason."""


class Stream:
    """Replaces a standard stream. stream: None: it is closed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def closed(self) -> bool:
        return self._stream is None or self._stream.closed

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class StandardOutput(Stream):
    """Replaces sys.stdout."""

    def write(self, text: str) -> int:
        """Raises OutputError; BrokenPipeError if its reader has closed it."""
        with _named():
            if self._stream is None:
                raise OutputError("standard output is closed")
            return self._stream.write(text)

    def flush(self) -> None:
        """Raises OutputError; BrokenPipeError if its reader has closed it."""
        with _named():
            if self._stream is not None:
                self._stream.flush()


class StandardError(Stream):
    """Replaces sys.stderr: messages that cannot be written are lost. lost: True after such a message."""

    lost = False

    def write(self, text: str) -> int:
        try:
            if self._stream is not None:
                return self._stream.write(text)
        except OSError:
            pass
        self.lost = True
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            if self._stream is not None:
                self._stream.flush()


def messages_lost() -> bool:
    """True if a message was lost."""
    messages: object = sys.stderr
    return isinstance(messages, StandardError) and messages.lost


def escaped(text: str) -> str:
    """The text on one line, with control characters escaped."""
    return "".join([char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text])


@contextlib.contextmanager
def messaging() -> Iterator[None]:
    """Errors of messages are ignored within the context. Without it, messages for a closed standard error would go to standard
    output.
    """
    _fill_standard_descriptors()
    with contextlib.redirect_stderr(cast(TextIO, StandardError(sys.stderr))):
        yield


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Used within `messaging`. Flushes printed text at the end. Raises OutputError; BrokenPipeError if its reader has closed
    it.
    """
    stream = sys.stdout
    output = StandardOutput(stream)
    try:
        with contextlib.redirect_stdout(cast(TextIO, output)):
            try:
                yield
            finally:
                output.flush()
    except (OutputError, BrokenPipeError):
        if stream is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def _fill_standard_descriptors() -> None:
    """Opens closed standard descriptors: otherwise the next socket or file would get the number, and libuv ends a process that
    closes one.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error
