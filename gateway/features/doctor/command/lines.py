"""Reads the lines of a file, optionally gzipped, one at a time and with bounds, because the file may have any content."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Final, cast

MAX_LINE: Final = 64 << 20  # bytes
_GZIP: Final = b"\x1f\x8b"


class FileError(Exception):
    """The file, or its rest, cannot be read. The message says why."""


def lines_of(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(number, line) of each line that is not blank; None for a line longer than MAX_LINE. path: "-" is standard input.

    Raises FileError.
    """
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise FileError("standard input is closed")
            yield from _unzipped(cast(BufferedReader, sys.stdin.buffer))
            return
        with path.open("rb") as file:
            yield from _unzipped(file)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise FileError(f"a damaged gzip file: {error}") from error
    except OSError as error:
        raise FileError(error.strerror or str(error)) from error


def _unzipped(file: BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Peeks at the beginning, because a pipe cannot be read twice."""
    if file.peek(len(_GZIP))[: len(_GZIP)] == _GZIP:
        with gzip.GzipFile(fileobj=file) as unzipped:
            yield from _lines(unzipped)
    else:
        yield from _lines(file)


def _lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            yield number, None
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE)
        elif stripped := line.strip():
            yield number, stripped
