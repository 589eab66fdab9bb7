"""A trace on disk that is valid at every moment: what has been written are whole lines, and whole gzip members.

Lines are collected, and written as one piece: compressed, if the name ends in .gz, as a gzip member of its own (a gzip file is
any number of them). If a piece cannot be written, because the disk is full, say, what there is of it is cut off again, and its
lines are counted as dropped.
"""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

PIECE_BYTES: Final = 1 << 18  # of lines, before they are compressed
LAST_BYTES: Final = 1 << 16  # of the file's bound, for the last line
GZIP: Final = ".gz"


class TraceFull(Exception):
    """No more can be written; its text says why. The file is valid."""


class TraceFile:
    """size: bytes on disk. dropped: lines that could not be written."""

    def __init__(self, path: Path, most_bytes: int, *, replace: bool = False) -> None:
        """Only its owner can read it, also one that was there. Raises OSError; FileExistsError without `replace`."""
        self.path = path
        self.size = 0
        self.dropped = 0
        self._most = most_bytes
        self._lines: list[bytes] = []
        self._waiting = 0  # bytes of lines
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK  # a pipe without a reader is an error
        self._file = os.open(path, flags | (0 if replace else os.O_EXCL), 0o600)
        os.set_blocking(self._file, True)
        self._is_device = not stat.S_ISREG(os.fstat(self._file).st_mode)
        try:
            if not self._is_device:
                os.fchmod(self._file, 0o600)  # before it is emptied: a file of somebody else stays whole
                os.ftruncate(self._file, 0)
        except OSError:
            os.close(self._file)
            raise

    def add(self, line: Mapping[str, Any]) -> None:
        """Raises TraceFull."""
        encoded = msgspec.json.encode(line)
        self._lines.append(encoded)
        self._waiting += len(encoded)
        if self._waiting >= PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Raises TraceFull. What could not be written is dropped."""
        self._write(self._most - LAST_BYTES)

    def close(self, last: Mapping[str, Any]) -> None:
        """Write the last line, as far as there is room. Raises TraceFull; the file is closed in any case."""
        try:
            self.flush()
        finally:
            try:
                self._lines, self._waiting = [msgspec.json.encode(last)], 1
                self._write(self._most)
            finally:
                os.close(self._file)

    def abandon(self) -> None:
        """Close it without a last line."""
        os.close(self._file)

    def _write(self, most: int) -> None:
        if not self._lines:
            return
        piece, lines = b"\n".join([*self._lines, b""]), len(self._lines)
        self._lines, self._waiting = [], 0
        if self.path.name.endswith(GZIP):
            piece = gzip.compress(piece, 6, mtime=0)
        if self.size + len(piece) > most:
            self.dropped += lines
            raise TraceFull(f"{self.path} has reached --max-mb")
        written = 0
        try:
            while written < len(piece):
                written += os.write(self._file, piece[written:])
        except OSError as error:
            self.dropped += lines
            if not self._is_device:
                os.ftruncate(self._file, self.size)
                os.lseek(self._file, self.size, os.SEEK_SET)
            raise TraceFull(f"{self.path} cannot be written: {error.strerror or error}") from error
        self.size += len(piece)
