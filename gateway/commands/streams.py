"""Standard output and standard error of commands, on a full disk, or closed.

Output that cannot be written ends any command with one line and a status. Python writes what is left in its buffer once more
when it ends, and complains then: so that goes nowhere after a failure. A message that cannot be written ends nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class OutputError(Exception):
    """Standard output cannot be written; its text says why."""


class Stream:
    """In the place of a standard stream. stream: None: it is closed."""

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
    """In the place of sys.stdout."""

    def write(self, text: str) -> int:
        """Raises OutputError; BrokenPipeError if its reader has left."""
        with _named():
            if self._stream is None:
                raise OutputError("standard output is closed")
            return self._stream.write(text)

    def flush(self) -> None:
        """Raises OutputError; BrokenPipeError if its reader has left."""
        with _named():
            if self._stream is not None:
                self._stream.flush()


class StandardError(Stream):
    """In the place of sys.stderr: what cannot be written there is lost. lost: something was."""

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
    """Whether something that was to be said could not be."""
    messages: object = sys.stderr
    return isinstance(messages, StandardError) and messages.lost


def escaped(text: str) -> str:
    """On one line, with nothing that a terminal obeys."""
    return "".join([char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text])


@contextlib.contextmanager
def messaging() -> Iterator[None]:
    """Within it messages fail nothing. Without it, those for a closed standard error would go to standard output."""
    _fill_standard_descriptors()
    with contextlib.redirect_stderr(cast(TextIO, StandardError(sys.stderr))):
        yield


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Within `messaging`. What is printed is written at its end. Raises OutputError; BrokenPipeError if its reader has left."""
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
    """Where one is closed, the next socket or file would get its number, and libuv ends a process that closes such a one."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error
