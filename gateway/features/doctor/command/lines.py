"""The lines of a file that may be gzipped, one at a time, with bounds: a file may be anything."""

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
    """The file cannot be read (on); its text says why."""


def lines_of(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(number, line) of each that is not blank; None: it is longer than MAX_LINE. path: "-" is standard input.

    Raises FileError.
    """
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise FileError("it is closed")
            yield from _unzipped(cast(BufferedReader, sys.stdin.buffer))
            return
        with path.open("rb") as file:
            yield from _unzipped(file)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise FileError(f"a damaged gzip file: {error}") from error
    except OSError as error:
        raise FileError(error.strerror or str(error)) from error


def _unzipped(file: BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """A pipe cannot be read twice, so its beginning is looked at and stays there."""
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
