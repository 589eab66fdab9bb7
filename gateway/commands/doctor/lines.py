"""The lines of a file that may be gzipped, one at a time, with bounds: a file may be anything."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, cast

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
            yield from _lines(sys.stdin.buffer)
            return
        with path.open("rb") as file:
            zipped = file.read(len(_GZIP)) == _GZIP
        if zipped:
            with gzip.open(path) as unzipped:
                yield from _lines(cast(BinaryIO, unzipped))
        else:
            with path.open("rb") as file:
                yield from _lines(file)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise FileError(f"a damaged gzip file: {error}") from error
    except OSError as error:
        raise FileError(error.strerror or str(error)) from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            yield number, None
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE)
        elif stripped := line.strip():
            yield number, stripped
