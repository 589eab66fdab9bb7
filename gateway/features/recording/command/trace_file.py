"""A trace on disk that is valid at any time: it consists of complete lines, and complete gzip members.

Lines are collected and written in pieces. If the name ends in .gz, each piece is compressed as a gzip member (a gzip file may
have any number of them). If a piece cannot be written, for example to a full disk, its written part is truncated, and its lines
are counted as dropped.
"""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

PIECE_BYTES: Final = 1 << 18  # lines per piece, before compression
LAST_BYTES: Final = 1 << 16  # part of the file's limit reserved for the last line
GZIP: Final = ".gz"


class TraceFull(Exception):
    """The file cannot grow. The message says why. The file is valid."""


class TraceFile:
    """size: bytes on disk. dropped: lines that could not be written."""

    def __init__(self, path: Path, max_bytes: int, *, replace: bool = False) -> None:
        """Makes the file readable for its owner only, even if it exists. Raises OSError; FileExistsError without `replace`."""
        self.path = path
        self.size = 0
        self.dropped = 0
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._waiting = 0  # bytes of collected lines
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK  # opening a pipe without a reader fails at once
        self._file = os.open(path, flags | (0 if replace else os.O_EXCL), 0o600)
        os.set_blocking(self._file, True)
        self._is_device = not stat.S_ISREG(os.fstat(self._file).st_mode)
        try:
            if not self._is_device:
                os.fchmod(self._file, 0o600)  # before truncation, so that another user's file stays unchanged
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
        """Writes the collected lines. Raises TraceFull; then they are dropped."""
        self._write(self._max_bytes - LAST_BYTES)

    def close(self, last: Mapping[str, Any]) -> None:
        """Writes the last line, if there is room. Raises TraceFull; the file is closed in any case."""
        try:
            self.flush()
        finally:
            try:
                self._lines, self._waiting = [msgspec.json.encode(last)], 1
                self._write(self._max_bytes)
            finally:
                os.close(self._file)

    def abandon(self) -> None:
        """Closes the file without a last line."""
        os.close(self._file)

    def _write(self, limit: int) -> None:
        if not self._lines:
            return
        piece, lines = b"\n".join([*self._lines, b""]), len(self._lines)
        self._lines, self._waiting = [], 0
        if self.path.name.endswith(GZIP):
            piece = gzip.compress(piece, 6, mtime=0)
        if self.size + len(piece) > limit:
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
